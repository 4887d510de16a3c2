"""vLLM's endpoints for tokens in, tokens out.

/inference/v1/generate takes what the render endpoints return; the derender endpoints take what it returns.
"""
