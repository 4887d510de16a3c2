"""The items of the Responses API: reading them from requests and building them from output."""
