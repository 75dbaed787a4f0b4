{{/* Requests and limits of a container with or without GPUs: (list $ own-values number-of-gpus defaults-without-gpus).
     Each GPU adds 4 CPUs and 16 GiB (limit: 64 GiB), because the defaults without GPUs are too small for a real model. */}}
{{- define "areal.gpuResources" -}}
{{- $own := index . 1 }}{{ $gpus := index . 2 | int }}{{ $default := index . 3 | fromYaml }}
{{- if $gpus }}
{{- $memory := dict "requests" (printf "%dGi" (mul 16 $gpus)) "limits" (printf "%dGi" (mul 64 $gpus)) }}
{{- $default = dict "requests" (dict "cpu" (mul 4 $gpus | toString) "memory" $memory.requests) "limits" (dict "memory" $memory.limits (index . 0).Values.gpuResource $gpus) }}
{{- end }}
{{- toYaml (mergeOverwrite $default (deepCopy $own)) }}
{{- end }}
