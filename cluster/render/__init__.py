"""Make files that create clusters elsewhere (KubeRay, Ray's cluster launcher, Slurm, SkyPilot), and check manifests."""
