"""How the trainer gives away the bytes of a policy version: by folder, by store, by broadcast.

`areal.weights` describes the ways, and has what both ends share: manifests, deltas, files.
"""
