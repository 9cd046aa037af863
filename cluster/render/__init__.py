"""Files that create clusters elsewhere, for KubeRay and Ray's cluster launcher, and checks of manifests."""
