"""What computes a training step: the torch-native engine and DeepSpeed, behind one contract (`engine`).

Optimisers, loss scale and the state by canonical name belong here. Imports `train.parallel`.
"""
