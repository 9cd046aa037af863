"""Select which parameters of a model are trained, and add small trained parameters (adapters) to frozen models."""
