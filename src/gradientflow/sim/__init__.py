"""What an iteration would take on a cluster that is not here: the runtime's own plans, played through by events."""
