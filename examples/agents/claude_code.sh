#!/bin/sh
# Claude Code with Chorale: sh examples/agents/claude_code.sh [options of Claude Code]
# Needs `chorale serve gpt-oss-120b` in another terminal, and curl. Claude Code uses its Anthropic Messages API.
set -eu
export ANTHROPIC_BASE_URL="${CHORALE_URL:-http://localhost:8000}"
export ANTHROPIC_AUTH_TOKEN="${CHORALE_API_KEY:-unused}"
if [ -z "${CHORALE_MODEL:-}" ]; then # the first model of the server
    models=$(curl -fsS -H "Authorization: Bearer $ANTHROPIC_AUTH_TOKEN" "$ANTHROPIC_BASE_URL/v1/models")
    CHORALE_MODEL=$(printf '%s' "$models" | grep -o '"id": *"[^"]*"' | head -n 1 | cut -d '"' -f 4)
fi
export ANTHROPIC_MODEL="$CHORALE_MODEL" ANTHROPIC_SMALL_FAST_MODEL="$CHORALE_MODEL"
exec "${CLAUDE:-claude}" "$@"
