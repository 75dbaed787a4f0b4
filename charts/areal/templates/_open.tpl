{{/* What values may say about any pod: the fields of `common`, and the same fields of each component. All pods of the
     chart are made by `areal.podTemplate`, so a field works everywhere or nowhere. */}}

{{/* The fields of `common` and of a component, joined: (list $ component-values). Lists are joined and maps are merged;
     of two entries with one name, the component's is used. Names that other charts use are read, too. */}}
{{- define "areal.fields" -}}
{{- $alias := dict "sidecarContainers" "sidecars" "extraContainers" "sidecars" "extraEnvVars" "extraEnv" "env" "extraEnv" "extraEnvFrom" "envFrom" "volumes" "extraVolumes" "volumeMounts" "extraVolumeMounts" "extraInitContainers" "initContainers" "containerSecurityContext" "securityContext" }}
{{- $all := dict }}
{{- range $values := list (index . 0).Values.common (index . 1) }}
{{- range $name, $value := $values | default dict }}
{{- $field := get $alias $name | default $name }}
{{- if kindIs "slice" $value }}{{ $_ := set $all $field (concat (get $all $field | default list) $value) }}
{{- else if kindIs "map" $value }}
{{- $merged := mergeOverwrite (deepCopy (get $all $field | default dict)) (deepCopy $value) }}
{{- range $key, $each := $value }}{{ if kindIs "invalid" $each }}{{ $_ := unset $merged $key }}{{ end }}{{ end }}
{{- $_ := set $all $field $merged }}
{{- else if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}{{ $_ := set $all $field $value }}{{ end }}
{{- end }}
{{- end }}
{{- toYaml $all }}
{{- end }}

{{/* Entries with one name, once: (list field entries). The last is used, at the place of the first. */}}
{{- define "areal.once" -}}
{{- $field := index . 0 }}{{ $last := dict }}{{ $order := list }}
{{- range index . 1 }}{{ $name := get . $field | toString }}
{{- if not (hasKey $last $name) }}{{ $order = append $order $name }}{{ end }}{{ $_ := set $last $name . }}
{{- end }}
{{- range $order }}
- {{ get $last . | toJson }}
{{- end }}
{{- end }}

{{/* A security context without `enabled`, which other charts have in it; with `enabled: false` it is empty. */}}
{{- define "areal.context" -}}
{{- if ne (get . "enabled" | toString) "false" }}{{ omit . "enabled" | toYaml }}{{ else }}{}{{ end }}
{{- end }}

{{/* Proxies and certificate authorities, as environment variables. Takes $. */}}
{{- define "areal.outsideEnv" -}}
{{- $proxy := .Values.common.proxy }}
{{- if or $proxy.http $proxy.https }}
{{- $inside := list "localhost" "127.0.0.1" "::1" ".svc" ".cluster.local" "$(KUBERNETES_SERVICE_HOST)" }}
{{- range list "gateway" "rollout" "reward" "buffer" "weight-sync" "trainer" "trainer-ranks" "sglang" "sandbox" "redis" "nats" }}{{ $inside = append $inside (include "areal.name" (list $ .)) }}{{ end }}
{{- range $name, $value := dict "http_proxy" $proxy.http "https_proxy" $proxy.https "no_proxy" (concat $inside $proxy.noProxy | join ",") }}
{{- if $value }}
- {name: {{ $name }}, value: {{ $value | quote }}}
- {name: {{ upper $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.common.caBundle }}{{ if or .configMap .secret }}
{{- range list "SSL_CERT_FILE" "REQUESTS_CA_BUNDLE" "CURL_CA_BUNDLE" "AWS_CA_BUNDLE" }}
- {name: {{ . }}, value: /etc/areal/ca/{{ $.Values.common.caBundle.key }}}
{{- end }}
{{- end }}{{ end }}
{{- end }}

{{/* `metadata` and `spec` of a pod template. Takes (dict "root" $ "component" "trainer" "own" component-values "spec" text).
     "spec" is the chart's part of the pod; its first container is the component's. Optional keys: "labels" and "annotations"
     (dicts), "job" true (its sidecars end with it), "account" (the ServiceAccount if none is named), "token" true. */}}
{{- define "areal.podTemplate" -}}
{{- $ := .root }}{{ $f := include "areal.fields" (list $ .own) | fromYaml }}{{ $pod := fromYaml .spec }}
{{- with $pod.Error }}{{ fail (printf "the pod of %s: %s" $.component .) }}{{ end }}
{{- $selector := include "areal.selectorLabels" (list $ .component) | fromYaml }}
{{- $main := first $pod.containers }}{{ $job := .job | default false }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "schedulerName" "runtimeClassName" "hostNetwork" "hostIPC" "dnsPolicy" "dnsConfig" "hostAliases" "resourceClaims" }}
{{- with get $f $field }}{{ $_ := set $pod $field . }}{{ end }}
{{- end }}
{{- range $pod.topologySpreadConstraints }}{{ if not .labelSelector }}{{ $_ := set . "labelSelector" (dict "matchLabels" $selector) }}{{ end }}{{ end }}
{{- if and $pod.hostNetwork (not $pod.dnsPolicy) }}{{ $_ := set $pod "dnsPolicy" "ClusterFirstWithHostNet" }}{{ end }}
{{- $_ := set $pod "enableServiceLinks" false }}
{{- $_ := set $pod "automountServiceAccountToken" (.token | default false) }}
{{- with include "areal.accountName" (list $ .component .own) | default $f.serviceAccountName | default .account }}{{ $_ := set $pod "serviceAccountName" . }}{{ end }}
{{- with include "areal.pullSecrets" (list $ $f) | fromYamlArray }}{{ $_ := set $pod "imagePullSecrets" . }}{{ end }}
{{- $context := include "areal.context" ($f.podSecurityContext | default dict) | fromYaml }}
{{- if $.Capabilities.APIVersions.Has "security.openshift.io/v1" }}
{{- /* OpenShift gives a namespace ids of its own, and refuses others. */}}
{{- range $id := list "runAsUser" "runAsGroup" "fsGroup" }}{{ if eq (get $context $id | toString) "10001" }}{{ $context = omit $context $id }}{{ end }}{{ end }}
{{- end }}
{{- $_ := set $pod "securityContext" $context }}
{{- $labels := dict }}
{{- range $pod.volumes }}
{{- if and (eq .name "data") .persistentVolumeClaim (eq $.Values.storage.accessMode "ReadWriteOnce") }}
{{- /* The volume can be attached to one node only, so all pods that mount it must run there. */}}
{{- $labels = dict "areal.io/volume" "data" }}
{{- $mates := dict "matchLabels" (dict "app.kubernetes.io/instance" $.Release.Name "areal.io/volume" "data") }}
{{- $affinity := deepCopy ($pod.affinity | default dict) }}
{{- $terms := append (dig "podAffinity" "requiredDuringSchedulingIgnoredDuringExecution" list $affinity) (dict "labelSelector" $mates "topologyKey" "kubernetes.io/hostname") }}
{{- $_ := set $pod "affinity" (mergeOverwrite $affinity (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $terms))) }}
{{- end }}
{{- end }}
{{- /* Of its containers. */}}
{{- $ca := $.Values.common.caBundle }}{{ $volumes := $f.extraVolumes | default list }}{{ $mounts := $f.extraVolumeMounts | default list }}
{{- if or $ca.configMap $ca.secret }}
{{- $from := ternary (dict "secret" (dict "secretName" $ca.secret)) (dict "configMap" (dict "name" $ca.configMap)) (ne $ca.secret "") }}
{{- $volumes = prepend $volumes (merge (dict "name" "ca") $from) }}{{ $mounts = prepend $mounts (dict "name" "ca" "mountPath" "/etc/areal/ca" "readOnly" true) }}
{{- end }}
{{- with $f.shmSize }}
{{- $shm := dict "medium" "Memory" "sizeLimit" . }}
{{- $volumes = prepend $volumes (dict "name" "shm" "emptyDir" $shm) }}{{ $mounts = prepend $mounts (dict "name" "shm" "mountPath" "/dev/shm") }}
{{- end }}
{{- $env := concat ($main.env | default list) (include "areal.outsideEnv" $ | fromYamlArray) ($f.extraEnv | default list) }}
{{- with include "areal.once" (list "name" $env) | fromYamlArray }}{{ $_ := set $main "env" . }}{{ end }}
{{- with $f.envFrom }}{{ $_ := set $main "envFrom" . }}{{ end }}
{{- with include "areal.once" (list "mountPath" (concat ($main.volumeMounts | default list) $mounts)) | fromYamlArray }}{{ $_ := set $main "volumeMounts" . }}{{ end }}
{{- with include "areal.once" (list "name" (concat ($pod.volumes | default list) $volumes)) | fromYamlArray }}{{ $_ := set $pod "volumes" . }}{{ end }}
{{- $_ := set $main "securityContext" (include "areal.context" ($f.securityContext | default dict) | fromYaml) }}
{{- $safe := pick $.Values.common.securityContext "allowPrivilegeEscalation" "capabilities" }}
{{- $inits := $pod.initContainers | default list }}
{{- range $f.initContainers }}{{ $inits = append $inits (mergeOverwrite (dict "securityContext" (deepCopy $safe)) (deepCopy .)) }}{{ end }}
{{- range $f.sidecars }}
{{- $sidecar := mergeOverwrite (dict "securityContext" (deepCopy $safe)) (deepCopy .) }}
{{- /* A Job would wait for an ordinary container for ever; one that Kubernetes knows to be a sidecar ends with it. */}}
{{- if $job }}{{ $inits = append $inits (set $sidecar "restartPolicy" "Always") }}{{ else }}{{ $_ := set $pod "containers" (append $pod.containers $sidecar) }}{{ end }}
{{- end }}
{{- with $inits }}{{ $_ := set $pod "initContainers" . }}{{ end }}
{{- if and $.Values.storage.subPath (ne .component "redis") }}
{{- range concat $pod.containers $inits }}{{ range .volumeMounts }}{{ if eq .name "data" }}{{ $_ := set . "subPath" $.Values.storage.subPath }}{{ end }}{{ end }}{{ end }}
{{- end }}
{{- /* Any other field. */}}
{{- with $f.container }}{{ $_ := mergeOverwrite $main (deepCopy .) }}{{ end }}
{{- with $f.podSpec }}{{ $pod = mergeOverwrite $pod (deepCopy .) }}{{ end }}
{{- $annotations := mergeOverwrite (deepCopy ($f.podAnnotations | default dict)) (.annotations | default dict) }}
{{- with include "areal.secretsChecksum" (list $ (eq $job true)) }}{{ $_ := set $annotations "checksum/secrets" . }}{{ end -}}
metadata:
  labels: {{- mergeOverwrite (deepCopy $.Values.commonLabels) ($f.labels | default dict) ($f.podLabels | default dict) $labels (.labels | default dict) $selector | toYaml | nindent 4 }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec: {{- toYaml $pod | nindent 2 }}
{{- end }}

{{/* Names of pull secrets as a pod lists them: (list $ fields). */}}
{{- define "areal.pullSecrets" -}}
{{- $root := index . 0 }}{{ $names := list }}
{{- range concat $root.Values.image.pullSecrets ($root.Values.global.imagePullSecrets | default list) ((index . 1).imagePullSecrets | default list) }}
{{- $names = append $names (ternary (get (ternary . dict (kindIs "map" .)) "name") . (kindIs "map" .)) }}
{{- end }}
{{- range uniq $names }}
- name: {{ . }}
{{- end }}
{{- end }}

{{/* The ServiceAccount that the chart makes or is told for a component: (list $ component component-values); empty: none. */}}
{{- define "areal.accountName" -}}
{{- $account := (index . 2).serviceAccount | default dict }}
{{- if (index . 2).serviceAccountName }}{{ (index . 2).serviceAccountName }}
{{- else if or $account.create $account.annotations }}{{ $account.name | default (include "areal.name" (list (index . 0) (index . 1))) }}
{{- else }}{{ $account.name | default "" }}{{ end }}
{{- end }}

{{/* `name`, `labels` and `annotations` of a workload: (dict "root" $ "component" "trainer" "own" component-values). Optional
     keys: "name", "annotations". */}}
{{- define "areal.workloadMeta" -}}
{{- $ := .root }}{{ $id := list .root .component }}{{ $f := include "areal.fields" (list $ .own) | fromYaml -}}
name: {{ .name | default (include "areal.name" $id) }}
labels: {{- include "areal.labels" $id | fromYaml | mergeOverwrite (deepCopy ($f.labels | default dict)) | toYaml | nindent 2 }}
{{- with mergeOverwrite (deepCopy $.Values.commonAnnotations) ($f.annotations | default dict) (.annotations | default dict) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* `metadata` of a Service: (dict "root" $ "component" "buffer" "own" component-values). Optional key: "suffix". */}}
{{- define "areal.serviceMeta" -}}
{{- $ := .root }}{{ $suffix := .suffix | default "" -}}
name: {{ include "areal.name" (list $ .component) }}{{ $suffix }}
labels: {{- include "areal.labels" (list $ (print .component $suffix)) | nindent 2 }}
{{- with mergeOverwrite (deepCopy $.Values.commonAnnotations) (dig "service" "annotations" dict $.Values.common) (dig "service" "annotations" dict (.own | default dict)) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What values may say about the `spec` of a Service: (list $ component-values external). */}}
{{- define "areal.serviceFields" -}}
{{- $f := mergeOverwrite (deepCopy ((index . 0).Values.common.service | default dict)) (deepCopy ((index . 1).service | default dict)) }}
{{- $fields := list "ipFamilyPolicy" "ipFamilies" }}
{{- if index . 2 }}{{ $fields = concat $fields (list "type" "loadBalancerClass" "loadBalancerIP" "loadBalancerSourceRanges" "externalTrafficPolicy" "sessionAffinity") }}{{ end }}
{{- $set := dict }}
{{- range $field := $fields }}{{ with get $f $field }}{{ $_ := set $set $field . }}{{ end }}{{ end }}
{{- with $set }}{{ toYaml . }}{{ end }}
{{- end }}
