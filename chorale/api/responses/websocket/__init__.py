"""Responses over one WebSocket connection."""
