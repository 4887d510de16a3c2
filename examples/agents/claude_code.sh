#!/bin/sh
# Claude Code on Chorale: sh examples/agents/claude_code.sh [its options]
# The server: chorale serve gpt-oss-120b. It answers Anthropic's Messages API, which Claude Code speaks.
set -eu
model="${CHORALE_MODEL:-openai/gpt-oss-120b}"
export ANTHROPIC_BASE_URL="${CHORALE_URL:-http://localhost:8000}"
export ANTHROPIC_AUTH_TOKEN="${CHORALE_API_KEY:-unused}"
export ANTHROPIC_MODEL="$model" ANTHROPIC_SMALL_FAST_MODEL="$model"
exec "${CLAUDE:-claude}" "$@"
