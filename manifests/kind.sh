#!/usr/bin/env bash
# Creates a kind cluster on this machine, with our images and the training operator: manifests/kind.sh [NAME]
# Needs docker, kind and kubectl, and the images from `make images`. Remove the cluster with: kind delete cluster --name NAME
set -euo pipefail
name=${1:-areal}
tag=${TAG:-dev}

kind get clusters | grep -qx "$name" || kind create cluster --name "$name" --wait 120s
kind load docker-image --name "$name" areal/{stores,control,reward,weight-sync,sandbox,inference-cpu,trainer}:"$tag"
kubectl --context "kind-$name" apply --server-side \
  -k "github.com/kubeflow/training-operator/manifests/overlays/standalone?ref=v1.9.3"
kubectl --context "kind-$name" -n kubeflow rollout status deploy/training-operator --timeout 180s
echo "helm --kube-context kind-$name install areal charts/areal -n areal --create-namespace -f charts/areal/ci/cpu-demo-values.yaml --wait"
