"""Run by `make test-integrations`, in a venv that has the libraries; elsewhere each file says what it lacks."""
