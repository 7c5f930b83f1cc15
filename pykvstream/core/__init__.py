"""Typed handles over the C ABI, one module for each public header.

The only package that imports ``pykvstream._ffi``.
"""
