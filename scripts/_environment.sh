# Sourced by scripts/demo and scripts/test: one virtual environment in .venv.
#
# After `ensure_environment EXTRA`, $venv_python is an interpreter that has this
# checkout installed (editable) together with the named extra.  Installing happens once;
# a stamp with the digest of pyproject.toml and of the interpreter says that it is done.

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 \
        /usr/bin/python3; do
        # Run it: a name on the path may be a launcher for a version that is missing.
        if "$candidate" -c \
            'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    cat >&2 <<'MESSAGE'
No suitable Python was found. Needed: Python 3.11 or newer with the modules venv and
ensurepip (on Debian and Ubuntu: the packages python3 and python3-venv).
Set PYTHON=/path/to/python to name one.
MESSAGE
    return 1
}

environment_stamp() {
    "$venv_python" - "$root/pyproject.toml" <<'PYTHON'
import hashlib, pathlib, sys

text = pathlib.Path(sys.argv[1]).read_bytes()
print(hashlib.sha256(text + sys.version.encode()).hexdigest())
PYTHON
}

ensure_environment() {
    local extra=$1
    local venv=$root/.venv
    venv_python=$venv/bin/python
    # The second condition: an environment that was moved with its checkout is broken.
    if ! "$venv_python" -c 'import pip' >/dev/null 2>&1 ||
        ! grep -qF "$venv" "$venv/bin/pip"; then
        local python
        python=$(find_python)
        echo "== making $venv with $("$python" --version 2>&1)"
        "$python" -m venv --clear "$venv"
    fi
    local stamp
    stamp=$(environment_stamp)
    local name
    # "dev" contains every other extra.
    for name in "$extra" dev; do
        if [[ -f $venv/.installed-$name && $(<"$venv/.installed-$name") == "$stamp" ]]; then
            return 0
        fi
    done
    echo "== installing torch, torchvision and this checkout with [$extra] (some minutes)"
    rm -f "$venv"/.installed-*
    "$venv_python" -m pip install --quiet --disable-pip-version-check torch torchvision
    "$venv_python" -m pip install --quiet --disable-pip-version-check \
        --editable "$root[$extra]"
    printf '%s\n' "$stamp" >"$venv/.installed-$extra"
}
