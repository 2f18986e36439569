#!/usr/bin/env bash
# Build a release, and try it as its users will:  scripts/release.sh
#
# Builds the wheel and the source archive into dist/, and the notes of the release into build/notes.md. Checks what is in
# them, installs the wheel into a new environment, and uses it in an empty folder. Publishes nothing: the workflow
# release.yml does, when a tag is pushed. Without a tag it is a trial, for which the section [Unreleased] is enough. The
# README that they get tells to clone TITANLITE_REPOSITORY.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
find_python dev pytest
VERSION=$("$PYTHON" -c 'import titanlite; print(titanlite.__version__)')
TAG=$(git tag --points-at HEAD 'v*')
[[ -z $(git status --porcelain) ]] || die "there are changes that are not committed"
[[ -z $TAG || $TAG == "v$VERSION" ]] || die "the tag is $TAG, and titanlite/version.py says $VERSION"
[[ -z $TAG ]] || grep -q "^## \[$VERSION\]" CHANGELOG.md || die "CHANGELOG.md has no section [$VERSION]: rename [Unreleased]"
grep -q "^version: $VERSION$" CITATION.cff || die "CITATION.cff has another version"

rm -rf dist
mkdir -p build
"$PYTHON" scripts/release_notes.py "$VERSION" >build/notes.md
SOURCE=$(mktemp -d)
trap 'rm -rf "$SOURCE"' EXIT
git archive HEAD | tar -x -C "$SOURCE" # no file that is not committed
[[ -z ${TITANLITE_REPOSITORY:-} ]] || sed -i "s|git clone URL|git clone $TITANLITE_REPOSITORY|" "$SOURCE/README.md"
build() { (cd "$1" && "$PYTHON" -c 'import sys; import setuptools.build_meta as build
for kind in sys.argv[1:]: getattr(build, f"build_{kind}")("dist")' "${@:2}" >/dev/null); }
build "$SOURCE" sdist wheel
cp -r "$SOURCE/dist" dist
names() { "$PYTHON" -m zipfile --list "$1"/dist/*.whl | awk 'NR > 1 {print $1}' | sort; }
mkdir "$SOURCE/unpacked"
tar -x -C "$SOURCE/unpacked" --strip-components=1 -f dist/*.tar.gz
build "$SOURCE/unpacked" wheel
diff <(names .) <(names "$SOURCE/unpacked") || die "the source archive makes another wheel, see above"
"$PYTHON" -m pytest -q tests/distributed/test_installed.py # contents of a wheel

make_venv "$SOURCE/venv"
install_packages "$SOURCE/venv" --quiet "$(echo dist/*.whl)[report]"
mkdir "$SOURCE/empty"
cd "$SOURCE/empty"
titanlite() { echo "\$ titanlite $*" && "$SOURCE/venv/bin/titanlite" "$@"; }
[[ $("$SOURCE/venv/bin/titanlite" --version) == "$VERSION" ]] || die "titanlite --version is not $VERSION"
titanlite init mine
titanlite check mine.toml
titanlite train mine.toml --training.steps=2 --validation.enable=false
titanlite plan mine.toml --world-size 8 --gpu H100
titanlite report outputs/mine
titanlite generate outputs/mine --prompt "def add(a, b):" --max-new-tokens 8
cd "$ROOT"
ls -l dist build/notes.md
echo "the release $VERSION works, in $((SECONDS / 60)) min $((SECONDS % 60)) s. To publish it: git tag v$VERSION && git push origin v$VERSION"
