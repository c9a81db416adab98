"""KV cache bookkeeping: blocks, prefixes, tables. Pure Python: it names blocks, the runner holds their memory.

Layers, each importing only those before it: ``block_pool`` (free list, reference counts), ``prefix_cache``
(what is in which block), ``block_table`` (what one sequence holds), ``manager`` (the operations a scheduler needs).
"""
