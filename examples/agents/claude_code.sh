#!/bin/sh
# Claude Code with Chorale: sh examples/agents/claude_code.sh [options of Claude Code]
# Needs `chorale serve gpt-oss-120b` in another terminal. Claude Code uses its Anthropic Messages API.
set -eu
model="${CHORALE_MODEL:-openai/gpt-oss-120b}"
export ANTHROPIC_BASE_URL="${CHORALE_URL:-http://localhost:8000}"
export ANTHROPIC_AUTH_TOKEN="${CHORALE_API_KEY:-unused}"
export ANTHROPIC_MODEL="$model" ANTHROPIC_SMALL_FAST_MODEL="$model"
exec "${CLAUDE:-claude}" "$@"
