"""Endpoints for operators: health, metrics, models, tokenization, the chat page and the API documentation."""
