"""Manifests for clusters elsewhere, KubeRay and Ray's launcher, and their checks against the published schemas.

Imports workers.
"""
