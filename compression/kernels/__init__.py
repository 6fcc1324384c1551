"""Building blocks that codecs share: tiles of blocks, bit packing, lookup tables, noise."""
