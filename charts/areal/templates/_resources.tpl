{{/* Requests and limits of what runs on CPUs or on GPUs: (list $ own-values number-of-gpus defaults-without-gpus).
     With GPUs each brings CPUs and memory along: an engine of a few GiB cannot stand for one that holds a real model. */}}
{{- define "areal.gpuResources" -}}
{{- $own := index . 1 }}{{ $gpus := index . 2 | int }}{{ $default := index . 3 | fromYaml }}
{{- if $gpus }}
{{- $memory := dict "requests" (printf "%dGi" (mul 16 $gpus)) "limits" (printf "%dGi" (mul 64 $gpus)) }}
{{- $default = dict "requests" (dict "cpu" (mul 4 $gpus | toString) "memory" $memory.requests) "limits" (dict "memory" $memory.limits (index . 0).Values.gpuResource $gpus) }}
{{- end }}
{{- toYaml (mergeOverwrite $default (deepCopy $own)) }}
{{- end }}
