"""Building blocks that codecs share: tiles of blocks, bit packing, lookup tables, noise.

Nothing is exported: codecs import the module that they need, and users import codecs.
"""
