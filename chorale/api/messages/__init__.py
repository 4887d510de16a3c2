"""/v1/messages: Anthropic's API. Converts blocks to harmony, and the event stream to blocks."""
