"""What operators use: health, metrics, models, tokenization, the chat page and the API's documentation."""
