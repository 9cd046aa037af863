"""Manifests and scripts that start a run on another cluster: KubeRay, Slurm, SkyPilot."""
