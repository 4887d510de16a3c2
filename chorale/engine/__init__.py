"""The engine proper: scheduler, hybrid paged KV cache, the step loop. Pure Python and numpy."""
