# shellcheck shell=sh
# Sourced by the scripts beside it, from the root of the checkout: `setup_venv EXTRAS` makes the
# virtual environment .venv, or reuses it, and installs m3compile[EXTRAS] there.
# Settings: PYTHON (interpreter), CXX (C++ compiler), and pip's own, such as PIP_INDEX_URL.

say() {
    printf '\n==> %s\n' "$*"
}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

python_version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# Set PYTHON to an interpreter of a supported version, and version to that version.
choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3 python3.13 python3.12 python3.11 python3.10 python
    fi
    found=
    for candidate in "$@"; do
        version=$(python_version "$candidate") || continue
        case $version in
            3.10 | 3.11 | 3.12 | 3.13)
                PYTHON=$candidate
                return
                ;;
        esac
        found="$found, $candidate is $version"
    done
    found=${found#, }
    die "no Python from 3.10 to 3.13 (${found:-none of $* runs}); install one, or set PYTHON to one"
}

# AOTInductor compiles C++ with OpenMP; found out here rather than minutes later.
check_compiler() {
    compiler=${CXX:-g++}
    command -v "${compiler%% *}" >/dev/null ||
        die "no C++ compiler ($compiler is not on the PATH); install g++, or set CXX to a compiler"
    probe=$(mktemp -d)
    printf '#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n' >"$probe/p.cpp"
    # CXX may hold flags after the compiler's name.
    # shellcheck disable=SC2086
    if ! reason=$($compiler -std=c++20 -fopenmp "$probe/p.cpp" -o "$probe/p" 2>&1 && "$probe/p"); then
        rm -r "$probe"
        die "the C++ compiler $compiler cannot build an OpenMP program:" \
            "$(printf '%s' "$reason" | head -n 1); install g++, or set CXX to a compiler that can"
    fi
    rm -r "$probe"
}

make_venv() {
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$PYTHON lacks the venv module; install it (Debian, Ubuntu: apt-get install python3-venv)"
    say "Make .venv with $PYTHON ($version)"
    # --clear: what is there, if anything, is a half-made environment.
    "$PYTHON" -m venv --clear .venv
}

setup_venv() {
    check_compiler
    if [ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then
        made_with=$(python_version .venv/bin/python)
        [ -z "${PYTHON:-}" ] || choose_python
        [ "${version:-$made_with}" = "$made_with" ] ||
            die ".venv is of Python $made_with, PYTHON is $version; remove .venv, or unset PYTHON"
    else
        choose_python
        make_venv
    fi
    # Says what was installed, from where; the same again needs neither pip nor the network. What
    # tools/quickstart installs is part of the extra dev.
    wanted="$(cat pyproject.toml constraints.txt | cksum) $PWD"
    if grep -qsxF "$wanted" ".venv/installed-$1" .venv/installed-dev; then
        say "Reuse .venv"
    else
        say "Install m3compile[$1] into .venv; PyTorch is a large download"
        .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$1]"
        printf '%s\n' "$wanted" >".venv/installed-$1"
    fi
}
