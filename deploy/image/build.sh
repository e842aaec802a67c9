#!/bin/sh
# Builds the image of a commit with buildah, podman or docker, whichever is here, as any user.
#
#     sh deploy/image/build.sh TAG [ARGUMENT=VALUE ...]      arguments of the Containerfile, such as EXTRA=gpu
#
# All times in the image are the same, so the layer of the packages stays until uv.lock changes. OPTIONS has more options
# for the builder, such as mirrors.
set -eu
cd "$(dirname "$0")/../.."
tag=$1
shift
[ -z "$(git status --porcelain)" ] || echo "image: has the files of the last commit, without the changes since" >&2
builder=$(for name in buildah podman docker; do command -v $name && break; done) || { echo "image: no buildah, podman or docker here: apt-get install buildah" >&2; exit 1; }
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
git archive HEAD -- . ':!tests' ':!.ci' ':!.github' | tar -x -C "$context"
time=315532800 # 1980, the first year of zip files
set -- "COMMIT=$(git rev-parse --short=12 HEAD)" "$@"
for argument; do
    shift
    set -- "$@" --build-arg "$argument"
done
case $builder in
*docker) export SOURCE_DATE_EPOCH="$time"; set -- buildx build --load --output type=image,rewrite-timestamp=true "$@" ;;
*) set -- build --timestamp "$time" --layers "$@" ;;
esac
# shellcheck disable=SC2086
"$builder" "$@" ${OPTIONS:-} --tag "$tag" --file "$context/deploy/image/Containerfile" "$context"
echo "image: $tag"
