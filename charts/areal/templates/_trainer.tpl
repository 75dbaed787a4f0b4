{{/* The trainer's pods, which are the same in all kinds of workload.
     `areal.trainerPod` takes (dict "root" $ "container" name "rank" "0" "torchrun" true). */}}

{{- define "areal.trainerProcesses" -}}
{{ max 1 (int .Values.trainer.gpusPerPod) }}
{{- end }}

{{/* A job's pods cannot be changed, so its name has a hash of its whole spec: another spec is another job, and the same name
     means the same pods. Takes (list $ component spec), the spec with `@NAME@` where the name belongs. */}}
{{- define "areal.jobName" -}}
{{- include "areal.name" (list (index . 0) (index . 1)) }}-{{ index . 2 | fromYaml | toJson | sha256sum | trunc 8 }}
{{- end }}

{{/* What the trainer's processes read only once. The recipe and the experiment are mounted; their digests make a change of
     them a change of the pod. */}}
{{- define "areal.trainerDigests" -}}
checksum/config: {{ include "areal.experiment" . | sha256sum }}
checksum/recipe: {{ include "areal.recipe" . | sha256sum }}
{{- end }}

{{/* The pod template of the trainer; takes what `areal.trainerPod` takes. */}}
{{- define "areal.trainerTemplate" -}}
{{- $labels := dict }}{{ with .rank }}{{ $labels = dict "areal.io/trainer-rank" . }}{{ end }}
{{- include "areal.podTemplate" (dict "root" .root "component" "trainer" "own" .root.Values.trainer "job" true "labels" $labels "annotations" (include "areal.trainerDigests" .root | fromYaml) "spec" (include "areal.trainerPod" .)) }}
{{- end }}

{{- define "areal.trainerPod" -}}
{{- $ := .root }}{{ $values := .root.Values.trainer -}}
terminationGracePeriodSeconds: {{ $values.gracePeriodSeconds }}
{{- with .restartPolicy }}
restartPolicy: {{ . }}
{{- end }}
{{- with .subdomain }}
subdomain: {{ . }}
{{- end }}
initContainers:
  {{- include "areal.waitForModel" $ | nindent 2 }}
containers:
  - name: {{ .container }}
    image: {{ include "areal.image" (list $ "trainer" $values.image) }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    {{- if .torchrun }}
    # Reads PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR and PET_MASTER_PORT.
    command: [python, -m, torch.distributed.run, -m, areal_trainer]
    {{- else }}
    # One process per pod; it reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    command: [areal-trainer]
    {{- end }}
    args: [--config, /etc/areal/config/config.yaml, --listen, {{ include "areal.listen" (list $ 50051) | quote }}, --metrics, {{ include "areal.listen" (list $ 9100) | quote }}]
    workingDir: /data
    env:
      - {name: HOME, value: /tmp}
      # SGLang sets the same values. With others, a process group of trainer and servers may hang.
      - {name: NCCL_CUMEM_ENABLE, value: "0"}
      - {name: NCCL_NVLS_ENABLE, value: "0"}
      # This file survives the container, but not the pod: bad input is not tried again in the same pod.
      - {name: AREAL_POD_VERDICT, value: /dev/shm/areal-verdict}
      # Files, which the kubelet renews: training continues while the token is rotated.
      - {name: AREAL_SECURITY_DIR, value: /etc/areal/auth}
      {{- with .env }}{{ toYaml . | nindent 6 }}{{ end }}
      {{- with include "areal.tracingEnv" $ }}{{ . | nindent 6 }}{{ end }}
    # No probes: ranks find each other by names that resolve only while pods are ready, and they do so
    # before any port is open. Instead, ranks watch each other, and all of them exit when one is lost.
    ports:
      - {name: grpc, containerPort: 50051}
      - {name: metrics, containerPort: 9100}
      - {name: pytorchjob-port, containerPort: 23456}
    securityContext: {{- include "areal.securityContext" $ | nindent 6 }}
    resources: {{- include "areal.gpuResources" (list $ $values.resources $values.gpusPerPod "{requests: {cpu: 200m, memory: 1Gi}, limits: {memory: 8Gi}}") | nindent 6 }}
    volumeMounts:
      {{- include "areal.configMounts" $ | nindent 6 }}
      - {name: auth, mountPath: /etc/areal/auth, readOnly: true}
      - {name: recipe, mountPath: /etc/areal/recipe, readOnly: true}
      - {name: data, mountPath: /data}
      - {name: shm, mountPath: /dev/shm}
volumes:
  {{- include "areal.configVolumes" $ | nindent 2 }}
  - name: auth
    projected:
      defaultMode: 0440
      sources:
        - secret: {name: {{ include "areal.secretName" $ }}, items: [{key: token, path: token}]}
        - secret: {name: {{ include "areal.secretName" $ }}, optional: true, items: [{key: token-previous, path: token-previous}]}
  - name: recipe
    configMap: {name: {{ include "areal.name" (list $ "recipe") }}}
  {{- include "areal.dataVolume" $ | nindent 2 }}
  - {name: shm, emptyDir: {medium: Memory}}
{{- end }}
