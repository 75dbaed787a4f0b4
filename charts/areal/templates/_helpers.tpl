{{/* Helpers that all templates share. `areal.name` and the label helpers take (list $ "component"). */}}

{{/* At most 31 characters: chart and operators add up to 32 (`-trainer-01234567` and `-node-0-0-abcde`), and a DNS label has at most 63.
     A longer name is cut and gets a hash of the whole name, so `…-trial1` and `…-trial2` stay different. */}}
{{- define "areal.fullname" -}}
{{- $full := .Values.fullnameOverride | default .Release.Name }}
{{- if not (or .Values.fullnameOverride (contains "areal" $full)) }}{{ $full = printf "%s-areal" $full }}{{ end }}
{{- if gt (len $full) 31 }}{{ $full = printf "%s-%s" ($full | trunc 24 | trimSuffix "-") (sha256sum $full | trunc 6) }}{{ end }}
{{- $full }}
{{- end }}

{{/* Name of a component's objects. In a release named areal, the servers' name is just `sglang`, as in `kubectl scale deploy/sglang`. */}}
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
{{- with (index . 0).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Image reference: (list $ "control" override). Fails without a repository: our images are not published, and docker.io/areal is not ours. */}}
{{- define "areal.image" -}}
{{- $root := index . 0 }}{{ $image := $root.Values.image }}{{ $name := index . 1 }}{{ $tag := $image.tag | default $root.Chart.AppVersion }}
{{- $own := index . 2 | default (get $image.references $name) }}
{{- if not (or $own $image.repository $image.registry $root.Values.global.imageRegistry (eq $tag "dev")) }}
{{- fail (printf "image.repository is empty, and no image of areal is published: push those of `make images` and set it, e.g. to registry.example.com/areal (image.references.%s: a single one; image.tag=dev: those built on the nodes)" $name) }}
{{- end }}
{{- $default := dict "registry" $image.registry "repository" (printf "%s/%s" ($image.repository | default "areal") $name) "tag" $tag }}
{{- include "areal.reference" (list $root (ternary (mergeOverwrite $default (ternary $own dict (kindIs "map" $own))) $own (or (not $own) (kindIs "map" $own)))) }}
{{- end }}

{{/* A reference, quoted: (list $ text-or-map), the map with registry, repository, tag and digest. global.imageRegistry takes
     the place of the registry of every image. */}}
{{- define "areal.reference" -}}
{{- $image := index . 1 }}{{ $registry := (index . 0).Values.global.imageRegistry }}
{{- if kindIs "map" $image }}
{{- $whole := ternary (printf "%s/%s" $image.registry $image.repository) $image.repository (ne ($image.registry | default "") "") }}
{{- $image = ternary (printf "%s@%s" $whole $image.digest) (printf "%s:%s" $whole (toString $image.tag)) (ne ($image.digest | default "") "") }}
{{- end }}
{{- if $registry }}
{{- $image = printf "%s/%s" $registry (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $image "") }}
{{- end }}
{{- $image | quote }}
{{- end }}

{{/* Of the chart's own init containers and sidecars. A component's `securityContext` is for its own container. */}}
{{- define "areal.securityContext" -}}
{{- include "areal.context" (.Values.common.securityContext | default dict) }}
{{- end }}

{{/* `true` if servers mount no volume for weights, because weights are streamed or in an object store: as services/areal/config/transports.py says of each transport. Takes the experiment. */}}
{{- define "areal.remoteWeights" -}}
{{- $own := dig "weight_sync" dict . }}
{{- if or (eq (dig "transport" "disk" $own) "stream") (contains "://" (dig "path" "" $own)) }}true{{ end }}
{{- end }}

{{/* One environment variable from the Secret: (list $ "AREAL_TOKEN" "token") */}}
{{- define "areal.secretEnv" -}}
{{- $root := index . 0 }}
- name: {{ index . 1 }}
  valueFrom: {secretKeyRef: {name: {{ include "areal.secretName" $root }}, key: {{ index . 2 }}}}
{{- if eq (index . 1) "AREAL_TOKEN" }}
# While the token is rotated: the one before.
- name: AREAL_TOKEN_PREVIOUS
  valueFrom: {secretKeyRef: {name: {{ include "areal.secretName" $root }}, key: token-previous, optional: true}}
{{- end }}
{{- end }}

{{/* OpenTelemetry's standard environment variables, which say where to send traces. */}}
{{- define "areal.tracingEnv" -}}
{{- with .Values.tracing }}{{ if .endpoint -}}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
{{- with .env }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}{{ end }}
{{- end }}

{{- define "areal.secretName" -}}
{{ .Values.auth.existingSecret | default (printf "%s-auth" (include "areal.fullname" .)) }}
{{- end }}

{{/* The experiment file of all components. The chart's own settings override the user's file, and `overrides` override both. */}}
{{- define "areal.experiment" -}}
{{- $user := fromYaml (.Values.config | default (.Files.Get "files/arithmetic_grpo.yaml")) }}
{{- with $user.Error }}{{ fail (printf "config: not a YAML mapping: %s" .) }}{{ end }}
{{- /* Of the sections that templates read: they run before validate.yaml. */}}
{{- range $section := list "endpoints" "model" "sandbox" "security" "stack" "weight_sync" }}
{{- range $where, $given := dict "config" $user "overrides" $.Values.overrides }}
{{- $value := get $given $section | default dict }}
{{- if not (kindIs "map" $value) }}{{ fail (printf "%s.%s %v: expected a mapping" $where $section $value) }}{{ end }}
{{- end }}
{{- end }}
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
{{- /* With it, a trainer that finds no GPU in its pod ends; without it, it would train on the CPUs. */}}
{{- if and .Values.trainer.gpusPerPod (not (get ($user.stack | default dict) "gpus_per_node")) }}
{{- $_ := set $chart "stack" (dict "gpus_per_node" (int .Values.trainer.gpusPerPod)) }}
{{- end }}
{{- if .Values.tls.existingSecret }}
{{- $_ := set $chart "security" (dict "tls_dir" "/etc/areal/tls") }}
{{- end }}
{{- include "areal.withSandbox" (list $ (mustMergeOverwrite $user $chart (deepCopy .Values.overrides))) }}
{{- end }}

{{- define "areal.recipe" -}}
{{ .Values.recipe | default (.Files.Get "files/arithmetic_grpo.py") }}
{{- end }}

{{/* model.path on the volume. References such as `${seed}` are replaced by the experiment's top-level values. */}}
{{- define "areal.modelPath" -}}
{{- $config := include "areal.experiment" . | fromYaml }}
{{- $path := dig "model" "path" "" $config | toString }}
{{- range $key, $value := $config }}
{{- if kindIs "float64" $value }}{{ $value = int64 $value }}{{ end }}
{{- if not (kindIs "map" $value) }}{{ $path = replace (printf "${%s}" $key) (toString $value) $path }}{{ end }}
{{- end }}
{{- if isAbs $path }}{{ $path }}{{ else }}/data/{{ $path }}{{ end }}
{{- end }}

{{/* Number of replicas: (list $ values component). The live number stays until replicaCount changes; with an autoscaler it always stays.
     If the chart set no number, an upgrade would remove the field, and the API server would set it to 1.
     Nothing if replicaCount is null: then the number belongs to somebody else, e.g. under GitOps with an autoscaler. */}}
{{- define "areal.replicas" -}}
{{- if not (kindIs "invalid" (index . 1).replicaCount) }}
{{- $root := index . 0 }}{{ $wanted := (index . 1).replicaCount | toString }}
{{- $live := lookup "apps/v1" "Deployment" $root.Release.Namespace (include "areal.name" (list $root (index . 2))) | default dict }}
{{- if dig "autoscaling" "enabled" false (index . 1) }}
{{- $first := max (index . 1).replicaCount (index . 1).autoscaling.minReplicas }}
{{- dig "spec" "replicas" $first $live | int }}
{{- else if eq (dig "metadata" "annotations" "areal.io/replica-count" "" $live) $wanted }}{{ $live.spec.replicas | int }}{{ else }}{{ $wanted }}{{ end }}
{{- end }}
{{- end }}

{{/* The annotation from which an upgrade learns whether replicaCount has changed. Takes the component's values. */}}
{{- define "areal.replicaCount" -}}
{{- if not (kindIs "invalid" .replicaCount) }}areal.io/replica-count: {{ .replicaCount | quote }}{{ end }}
{{- end }}

{{/* What a value of an experiment should have been, or nothing: (list rule value), with a rule of files/keys.json. Text may be a
     number, because --set makes text of 0.5, and may refer to another key. */}}
{{- define "areal.expected" -}}
{{- $rule := index . 0 }}{{ $value := index . 1 }}{{ $kind := $rule.kind }}{{ $good := true }}
{{- $text := toString $value | replace "_" "" }}{{ $number := has (kindOf $value) (list "int" "int64" "float64") }}
{{- if or (kindIs "invalid" $value) (and (kindIs "string" $value) (contains "${" $text)) }}
{{- else if eq $kind "integer" }}{{ $good = ternary (eq (floor $value) (float64 $value)) (regexMatch "^[+-]?([0-9]+|0[xob][0-9a-fA-F]+)$" $text) $number }}
{{- else if eq $kind "number" }}{{ $good = or $number (regexMatch "^[+-]?(([0-9]+\\.?[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?|\\.?(?i:inf|nan))$" $text) }}
{{- else if eq $kind "flag" }}{{ $good = or $number (regexMatch "^(?i:true|false|yes|no|on|off|y|n|0|1)$" $text) }}
{{- else if eq $kind "text" }}{{ $good = not (has (kindOf $value) (list "map" "slice")) }}
{{- else if eq $kind "choice" }}{{ $good = has (toString $value) $rule.choices }}
{{- else if eq $kind "list" }}{{ $good = kindIs "slice" $value }}
{{- else if eq $kind "mapping" }}{{ $good = kindIs "map" $value }}
{{- end }}
{{- if and $good (or $number (kindIs "string" $value)) (has $kind (list "integer" "number")) (not (contains "${" $text)) }}
{{- $size := float64 $text }}
{{- if and (hasKey $rule "ge") (lt $size (get $rule "ge" | float64)) }}{{ $good = false }}{{ end }}
{{- if and (hasKey $rule "gt") (le $size (get $rule "gt" | float64)) }}{{ $good = false }}{{ end }}
{{- if and (hasKey $rule "le") (gt $size (get $rule "le" | float64)) }}{{ $good = false }}{{ end }}
{{- if and (hasKey $rule "lt") (ge $size (get $rule "lt" | float64)) }}{{ $good = false }}{{ end }}
{{- end }}
{{- if not $good }}{{ $rule.expected }}{{ end }}
{{- end }}

{{/* The dotted keys of an experiment, as a list: (list prefix mapping sections). It descends into sections only. */}}
{{- define "areal.paths" -}}
{{- $prefix := index . 0 }}{{ $sections := index . 2 }}
{{- range $key, $value := index . 1 }}
{{- $path := printf "%s%s" $prefix $key }}
- {{ $path | quote }}
{{- if and (kindIs "map" $value) (has $path $sections) }}{{ include "areal.paths" (list (printf "%s." $path) $value $sections) }}{{ end }}
{{- end }}
{{- end }}
