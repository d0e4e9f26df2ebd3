"""`python -m gradientflow`, the command line."""

from gradientflow.cli import main

main()
