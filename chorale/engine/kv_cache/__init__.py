"""The KV cache's pages: the pool, prefix hashes and the two layouts of gpt-oss's layers."""
