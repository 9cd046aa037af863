"""How weights change: each optimizer with its update, its slots and its schedule."""
