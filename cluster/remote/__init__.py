"""A cluster whose nodes are on other machines, started over SSH."""
