{{/* What every template uses. `areal.name` and its neighbours take (list $ "component"). */}}

{{/* Operators add to the longest names up to 32 characters (`-trainer-01234567` and `-node-0-0-abcde`), and 63 are what DNS
     has room for. What is cut keeps its own hash: `long-trial1` and `long-trial2` stay two. */}}
{{- define "areal.fullname" -}}
{{- $full := .Release.Name }}{{ if not (contains "areal" $full) }}{{ $full = printf "%s-areal" $full }}{{ end }}
{{- if gt (len $full) 31 }}{{ $full = printf "%s-%s" ($full | trunc 24 | trimSuffix "-") (sha256sum $full | trunc 6) }}{{ end }}
{{- $full }}
{{- end }}

{{/* Of a component; the servers are `sglang` in a release named areal, so that `kubectl scale deploy/sglang` is right. */}}
{{- define "areal.name" -}}
{{- $root := index . 0 }}{{ $component := index . 1 }}{{ $full := include "areal.fullname" $root }}
{{- if and (eq $component "sglang") (eq $full "areal") }}sglang{{ else }}{{ $full }}-{{ $component }}{{ end }}
{{- end }}

{{- define "areal.selectorLabels" -}}
app.kubernetes.io/name: areal
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "areal.labels" -}}
{{ include "areal.selectorLabels" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{/* (list $ "control" "override"); nothing is published, and docker.io/areal is somebody else's. */}}
{{- define "areal.image" -}}
{{- $image := (index . 0).Values.image }}{{ $name := index . 1 }}{{ $tag := $image.tag | default (index . 0).Chart.AppVersion }}
{{- $own := index . 2 | default (get $image.references $name) }}
{{- if not (or $own $image.repository (eq $tag "dev")) }}
{{- fail (printf "image.repository is empty, and no image of areal is published: push those of `make images` and set it, e.g. to registry.example.com/areal (image.references.%s: a single one; image.tag=dev: those built on the nodes)" $name) }}
{{- end }}
{{- $own | default (printf "%s/%s:%s" ($image.repository | default "areal") $name $tag) | quote }}
{{- end }}

{{- define "areal.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "areal.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What all pods share, (list $ component-values). */}}
{{- define "areal.podSpec" -}}
{{- $root := index . 0 }}{{ $values := index . 1 -}}
securityContext:
  {{- include "areal.podSecurityContext" . | nindent 2 }}
enableServiceLinks: false
automountServiceAccountToken: false
{{- with $values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Whether servers read weights from no volume: streamed, or from an object store. Takes the experiment. */}}
{{- define "areal.remoteWeights" -}}
{{- $own := dig "weight_sync" dict . }}
{{- if or (eq (dig "transport" "disk" $own) "stream") (contains "://" (dig "path" "" $own)) }}true{{ end }}
{{- end }}

{{/* One variable from the Secret: (list $ "AREAL_TOKEN" "token") */}}
{{- define "areal.secretEnv" -}}
{{- $root := index . 0 }}
- name: {{ index . 1 }}
  valueFrom: {secretKeyRef: {name: {{ include "areal.secretName" $root }}, key: {{ index . 2 }}}}
{{- end }}

{{/* Where traces go: the standard variables of OpenTelemetry. */}}
{{- define "areal.tracingEnv" -}}
{{- with .Values.tracing }}{{ if .endpoint -}}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
{{- with .env }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}{{ end }}
{{- end }}

{{- define "areal.secretName" -}}
{{ .Values.auth.existingSecret | default (printf "%s-auth" (include "areal.fullname" .)) }}
{{- end }}

{{/* The experiment file that everything is started with: the user's, then what the chart knows, then `overrides`. */}}
{{- define "areal.experiment" -}}
{{- $user := fromYaml (.Values.config | default (.Files.Get "files/arithmetic_grpo.yaml")) }}
{{- with $user.Error }}{{ fail (printf "config: not a YAML mapping: %s" .) }}{{ end }}
{{- $address := dict }}
{{- range $key, $component := dict "buffer" "buffer" "rollout" "rollout" "reward" "reward" "weightSync" "weight-sync" "trainer" "trainer" }}
{{- if (index $.Values $key).enabled }}{{ $_ := set $address (snakecase $key) (printf "%s:50051" (include "areal.name" (list $ $component))) }}{{ end }}
{{- end }}
{{- if .Values.gateway.enabled }}{{ $_ := set $address "gateway" (printf "http://%s:8080" (include "areal.name" (list $ "gateway"))) }}{{ end }}
{{- if .Values.sglang.enabled }}{{ $_ := set $address "inference" (list (printf "kubernetes://%s/%s:30000" .Release.Namespace (include "areal.name" (list $ "sglang")))) }}{{ end }}
{{- $_ := set $address "redis" (ternary (printf "redis://%s:6379/0" (include "areal.name" (list $ "redis"))) .Values.redis.externalUrl .Values.redis.enabled) }}
{{- $_ := set $address "nats" (ternary (printf "nats://%s:4222" (include "areal.name" (list $ "nats"))) .Values.nats.externalUrl .Values.nats.enabled) }}
{{- if .Values.weightSync.enabled }}{{ $_ := set $address "weight_store" (printf "http://%s:8500" (include "areal.name" (list $ "weight-sync"))) }}{{ end }}
{{- $chart := dict "endpoints" $address "recipe" "/etc/areal/recipe/recipe.py" }}
{{- if .Values.tls.existingSecret }}
{{- $_ := set $chart "security" (dict "tls_dir" "/etc/areal/tls") }}
{{- end }}
{{- include "areal.withSandbox" (list $ (mustMergeOverwrite $user $chart (deepCopy .Values.overrides))) }}
{{- end }}

{{- define "areal.recipe" -}}
{{ .Values.recipe | default (.Files.Get "files/arithmetic_grpo.py") }}
{{- end }}

{{/* model.path on the volume, with `${seed}` and its like filled in from the top level of the experiment. */}}
{{- define "areal.modelPath" -}}
{{- $config := include "areal.experiment" . | fromYaml }}
{{- $path := dig "model" "path" "" $config }}
{{- range $key, $value := $config }}
{{- if kindIs "float64" $value }}{{ $value = int64 $value }}{{ end }}
{{- if not (kindIs "map" $value) }}{{ $path = replace (printf "${%s}" $key) (toString $value) $path }}{{ end }}
{{- end }}
{{- if isAbs $path }}{{ $path }}{{ else }}/data/{{ $path }}{{ end }}
{{- end }}

{{/* Pods kept by `kubectl scale`: the live number, until replicaCount itself changes; under an autoscaler the live number,
     always: without one in the chart Helm would take it away, and the API would make it 1. (list $ values component) */}}
{{- define "areal.replicas" -}}
{{- $root := index . 0 }}{{ $wanted := (index . 1).replicaCount | toString }}
{{- $live := lookup "apps/v1" "Deployment" $root.Release.Namespace (include "areal.name" (list $root (index . 2))) | default dict }}
{{- if dig "autoscaling" "enabled" false (index . 1) }}
{{- $first := max (index . 1).replicaCount (index . 1).autoscaling.minReplicas }}
{{- dig "spec" "replicas" $first $live | int }}
{{- else if eq (dig "metadata" "annotations" "areal.io/replica-count" "" $live) $wanted }}{{ $live.spec.replicas | int }}{{ else }}{{ $wanted }}{{ end }}
{{- end }}
