"""The runtime under other people's interfaces."""
