{{/* Volumes, init containers and services that several components share. */}}

{{- define "areal.configVolumes" -}}
- name: config
  configMap: {name: {{ include "areal.name" (list . "config") }}}
- name: tmp
  emptyDir: {}
{{- if .Values.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ .Values.tls.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "areal.configMounts" -}}
- {name: config, mountPath: /etc/areal/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/areal/tls, readOnly: true}
{{- end }}
{{- end }}

{{/* The volume of models, weights and checkpoints, mounted at /data. This is the working directory, so relative paths are on the volume. */}}
{{- define "areal.dataVolume" -}}
- name: data
{{- if .Values.storage.hostPath }}
  hostPath: {path: {{ .Values.storage.hostPath }}, type: DirectoryOrCreate}
{{- else }}
  persistentVolumeClaim: {claimName: {{ .Values.storage.existingClaim | default (include "areal.name" (list . "data")) }}}
{{- end }}
{{- end }}

{{/* The kubelet creates a hostPath folder as root. This init container changes the owner before any process writes there. */}}
{{- define "areal.ownFolder" -}}
- name: own-folder
  image: {{ include "areal.image" (list . "control" "") }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [chown, {{ printf "%v:%v" (.Values.common.podSecurityContext.runAsUser | default 10001 | int) (.Values.common.podSecurityContext.runAsGroup | default 10001 | int) | quote }}, /data]
  # The only container that runs as root, because chown needs it.
  securityContext:
    runAsUser: 0
    runAsGroup: 0
    runAsNonRoot: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL], add: [CHOWN]}
  resources: {{- include "areal.smallResources" . | nindent 4 }}
  volumeMounts:
    - {name: data, mountPath: /data}
{{- end }}

{{- define "areal.smallResources" -}}
{{- toYaml .Values.common.initResources }}
{{- end }}

{{/* An address to listen on: (list $ port). */}}
{{- define "areal.listen" -}}
{{- $host := (index . 0).Values.common.listenAddress }}
{{- ternary (printf "[%s]:%v" $host (index . 1)) (printf "%s:%v" $host (index . 1)) (contains ":" $host) }}
{{- end }}

{{/* The Job `prepare` creates or checks the model of version 0. Pods that read the model wait for that in this init container. */}}
{{- define "areal.waitForModel" -}}
- name: wait-for-model
  image: {{ include "areal.image" (list . "control" "") }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -ec]
  args:
    - |
      for second in $(seq "$DEADLINE"); do
        if test -f "$MODEL.ready"; then exit 0; fi
        if test $((second % 60)) = 10; then echo "waits for $MODEL: see the log of job/$PREPARE-..."; fi
        sleep 1
      done
      echo "$MODEL is not ready after $DEADLINE s: see the log of job/$PREPARE-..." >&2
      exit 1
  env:
    - {name: MODEL, value: {{ include "areal.modelPath" . | quote }}}
    - {name: PREPARE, value: {{ include "areal.fullname" . }}-prepare}
    - {name: DEADLINE, value: {{ .Values.prepare.deadlineSeconds | int | quote }}}
  securityContext: {{- include "areal.securityContext" . | nindent 4 }}
  resources: {{- include "areal.smallResources" . | nindent 4 }}
  volumeMounts:
    - {name: data, mountPath: /data, readOnly: true}
{{- end }}

{{/* The pod of one of the project's services; takes what `areal.service` takes. */}}
{{- define "areal.serviceSpec" -}}
{{- $ := .root }}{{ $values := index .root.Values .key }}{{ $listen := .listen | default 50051 }}{{ $port := ternary "http" "grpc" (eq $listen 8080) -}}
terminationGracePeriodSeconds: {{ add .grace 10 }}
{{- if .standby }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm: {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {{ include "areal.selectorLabels" (list $ .name) | fromYaml | toJson }}}}
{{- end }}
{{- if .data }}
initContainers: {{- include "areal.waitForModel" $ | nindent 2 }}
{{- end }}
containers:
  - name: {{ .name }}
    image: {{ include "areal.image" (list $ (.image | default "control") $values.image) }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    command: [areal-{{ .name }}]
    args: [--config, /etc/areal/config/config.yaml, --listen, {{ include "areal.listen" (list $ $listen) | quote }}, --metrics, {{ include "areal.listen" (list $ 9100) | quote }}, --grace, {{ .grace | quote }}]
    workingDir: {{ ternary "/data" "/tmp" (hasKey . "data") }}
    env:
      - {name: HOME, value: /tmp}
      # With the pod's name, a restarted container is the same worker, and its earlier leases return at once.
      - {name: AREAL_PROCESS, value: {{ .name }}}
      {{- include "areal.secretEnv" (list $ "AREAL_TOKEN" "token") | nindent 6 }}
      {{- range .secrets }}
      {{- include "areal.secretEnv" (list $ (index . 0) (index . 1)) | nindent 6 }}
      {{- end }}
      {{- with include "areal.tracingEnv" $ }}{{ . | nindent 6 }}{{ end }}
    ports:
      - {name: {{ $port }}, containerPort: {{ $listen }}}
      - {name: metrics, containerPort: 9100}
      {{- range $name, $number := .ports }}
      - {name: {{ $name }}, containerPort: {{ $number }}}
      {{- end }}
    # A process is alive while it waits for Redis, for CPU time, or as the standby of another pod; it is ready when it serves.
    startupProbe: {httpGet: {path: /livez, port: metrics}, periodSeconds: 1, timeoutSeconds: 2, failureThreshold: 300}
    readinessProbe: {httpGet: {path: /healthz, port: metrics}, periodSeconds: 1, timeoutSeconds: 3}
    # Restarts a process that hangs. The limits are long, to spare a process that only lacks CPU time.
    livenessProbe: {httpGet: {path: /livez, port: metrics}, periodSeconds: 15, timeoutSeconds: 10, failureThreshold: 12}
    # Gives callers time to see in the Endpoints, or in DNS (CoreDNS: 5 s), that the pod is leaving, before the process drains.
    lifecycle: {preStop: {exec: {command: [sleep, "6"]}}}
    securityContext: {{- include "areal.securityContext" $ | nindent 6 }}
    resources: {{- toYaml $values.resources | nindent 6 }}
    volumeMounts:
      {{- include "areal.configMounts" $ | nindent 6 }}
      {{- if .data }}
      - {name: data, mountPath: /data, readOnly: {{ ne .data "write" }}}
      {{- end }}
volumes:
  {{- include "areal.configVolumes" $ | nindent 2 }}
  {{- if .data }}
  {{- include "areal.dataVolume" $ | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Not empty, unless the cluster has this Service with an address of its own, which no upgrade can take away: (list $ name). */}}
{{- define "areal.mayBeHeadless" -}}
{{- $live := lookup "v1" "Service" (index . 0).Release.Namespace (include "areal.name" .) | default dict }}
{{- if eq (dig "spec" "clusterIP" "None" $live) "None" }}yes{{ end }}
{{- end }}

{{/* The Deployment and Service of one of the project's services. Takes (dict "root" $ "key" "weightSync" "name" "weight-sync" "grace" 30).
     Optional keys: "secrets" (list variable key …), "data" "read" or "write", "listen" 8080, "account" (name of a ServiceAccount),
     "image" "weight-sync", "recreate" true, "standby" true, "spread" true, "ports" (dict name 8500) */}}
{{- define "areal.service" -}}
{{- $ := .root }}{{ $values := index .root.Values .key }}{{ $id := list .root .name }}{{ $listen := .listen | default 50051 }}{{ $port := ternary "http" "grpc" (eq $listen 8080) }}
{{- if $values.enabled -}}
apiVersion: apps/v1
kind: Deployment
metadata: {{- include "areal.workloadMeta" (dict "root" $ "component" .name "own" $values "annotations" (include "areal.replicaCount" $values | fromYaml)) | nindent 2 }}
spec:
  {{- with include "areal.replicas" (list $ $values .name) }}
  replicas: {{ . }}
  {{- end }}
  {{- if .data }}
  # The pod waits for the model until prepare's deadline; then its process starts.
  progressDeadlineSeconds: {{ add $.Values.prepare.deadlineSeconds 900 }}
  {{- end }}
  strategy: {{ if .standby }}{type: RollingUpdate, rollingUpdate: {maxSurge: 0, maxUnavailable: 100%}}{{ else if .recreate }}{type: Recreate}{{ else }}{type: RollingUpdate, rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}{{ end }}
  selector:
    matchLabels: {{- include "areal.selectorLabels" $id | nindent 6 }}
  template:
    {{- $checksum := dict "checksum/config" (include "areal.experiment" $ | sha256sum) }}
    {{- include "areal.podTemplate" (dict "root" $ "component" .name "own" $values "annotations" $checksum "account" .account "token" (hasKey . "account") "spec" (include "areal.serviceSpec" .)) | nindent 4 }}
---
apiVersion: v1
kind: Service
metadata: {{- include "areal.serviceMeta" (dict "root" $ "component" .name "own" $values) | nindent 2 }}
spec:
  {{- with include "areal.serviceFields" (list $ $values false) }}{{ . | nindent 2 }}{{ end }}
  {{- if and .spread (include "areal.mayBeHeadless" (list $ .name)) }}
  # Headless: the name has the address of each ready pod, and clients spread their calls over all of them.
  clusterIP: None
  {{- end }}
  selector: {{- include "areal.selectorLabels" $id | nindent 4 }}
  ports:
    - {name: {{ $port }}, port: {{ $listen }}, targetPort: {{ $port }}}
    - {name: metrics, port: 9100, targetPort: metrics}
    {{- range $name, $number := .ports }}
    - {name: {{ $name }}, port: {{ $number }}, targetPort: {{ $name }}}
    {{- end }}
{{- if ne (dig "service" "type" "ClusterIP" $values) "ClusterIP" }}
---
# For clients outside the cluster. It does not expose the metrics port.
apiVersion: v1
kind: Service
metadata: {{- include "areal.serviceMeta" (dict "root" $ "component" .name "own" $values "suffix" "-external") | nindent 2 }}
spec:
  {{- include "areal.serviceFields" (list $ $values true) | nindent 2 }}
  selector: {{- include "areal.selectorLabels" $id | nindent 4 }}
  ports:
    - name: {{ $port }}
      port: {{ $listen }}
      targetPort: {{ $port }}
      {{- with $values.service.nodePort }}
      nodePort: {{ . }}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}
