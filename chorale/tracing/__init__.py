"""Traces of requests: what is recorded, without a library (``context``), and its export by OpenTelemetry."""
