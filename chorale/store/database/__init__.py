"""SQLite and PostgreSQL: connections, the schema, and the SQL that both share."""
