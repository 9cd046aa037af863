"""A cluster whose nodes are on other machines, which are reached over ssh."""
