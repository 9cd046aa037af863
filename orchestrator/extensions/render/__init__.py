"""Files that start a job on other clusters: manifests for KubeRay, Ray's launcher, Slurm and SkyPilot."""
