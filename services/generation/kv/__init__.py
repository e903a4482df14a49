"""Moves the KV of a prefilled prompt from the worker that computed it to the one that decodes.

Torch-free: plain TCP, raw tensor bytes, chunks with checksums. Used by the torch engine.
"""
