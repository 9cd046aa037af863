"""The processes of a run: gangs of ranks on Ray actors or local processes, placement, fork servers, heartbeats
and nodes.
"""
