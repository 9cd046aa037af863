"""Engines, which compute training steps: torch-native and DeepSpeed, behind one contract (`engine`).

Optimisers, loss scale and the state by canonical name belong here. Imports `parallel`.
"""
