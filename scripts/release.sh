#!/usr/bin/env bash
# Build a release, and try it as its users will:  scripts/release.sh
#
# Builds the wheel and the source archive into dist/, checks what is in them, installs the wheel into a new environment
# outside of the repository, and trains there. Publishes nothing, and prints the commands that would.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
find_python dev pytest
VERSION=$("$PYTHON" -c 'import titanlite; print(titanlite.__version__)')
[[ -z $(git status --porcelain) ]] || die "there are changes that are not committed"
grep -q "^## \[$VERSION\]" CHANGELOG.md || die "CHANGELOG.md has no section [$VERSION]: rename [Unreleased]"
grep -q "^version: $VERSION$" CITATION.cff || die "CITATION.cff has another version"

rm -rf dist
SOURCE=$(mktemp -d)
trap 'rm -rf "$SOURCE"' EXIT
git archive HEAD | tar -x -C "$SOURCE" # no file that is not committed
(cd "$SOURCE" && "$PYTHON" -c 'from setuptools.build_meta import build_sdist, build_wheel
build_sdist("dist"); build_wheel("dist")' >/dev/null)
cp -r "$SOURCE/dist" dist
"$PYTHON" -m pytest -q tests/distributed/test_installed.py -m "slow or not slow" # contents of a wheel, and a run from it

"$PYTHON" -m venv "$SOURCE/venv"
"$SOURCE/venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
mkdir "$SOURCE/empty"
(cd "$SOURCE/empty" && "$SOURCE/venv/bin/titanlite" train debug --training.steps=2 --validation.enable=false)
ls -l dist
echo "the release $VERSION works. To publish it: git tag v$VERSION && git push origin v$VERSION, and upload dist/*"
