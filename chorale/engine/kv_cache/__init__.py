"""The KV cache's blocks: the pool, prefix hashes and the two layouts of gpt-oss's layers."""
