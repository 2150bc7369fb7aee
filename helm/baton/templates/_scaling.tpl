{{- /*
What scales a pool of instances: {root, labels, spec}. Prefill follows the prompt tokens that wait, decode the requests that
wait and, with KEDA, the part of the KV pool in use.
*/ -}}
{{- define "baton.workerScaler" -}}
{{- $scaling := .spec.autoscaling -}}
{{- $name := .labels.name -}}
{{- if eq $scaling.kind "hpa" }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "baton.metadata" .labels | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ $name }}}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  behavior:
    scaleDown: {stabilizationWindowSeconds: 300}
  metrics:
    {{- if $scaling.metrics }}
    {{- toYaml $scaling.metrics | nindent 4 }}
    {{- else if eq .spec.role "prefill" }}
    - type: Pods
      pods:
        metric: {name: baton_engine_waiting_prompt_tokens}
        target: {type: AverageValue, averageValue: "4096"}
    {{- else }}
    - type: Pods
      pods:
        metric: {name: baton_engine_num_waiting}
        target: {type: AverageValue, averageValue: "2"}
    {{- end }}
{{- else }}
{{- $pods := printf `namespace="%s",pod=~"%s-.*"` .root.Release.Namespace $name }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "baton.metadata" .labels | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ $name }}}
  minReplicaCount: {{ $scaling.minReplicas }}
  maxReplicaCount: {{ $scaling.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown: {stabilizationWindowSeconds: 300}
  triggers:
    {{- if $scaling.metrics }}
    {{- toYaml $scaling.metrics | nindent 4 }}
    {{- else }}
    {{- $address := required "autoscaling.prometheus is needed with kind keda" $scaling.prometheus }}
    {{- if eq .spec.role "prefill" }}
    - type: prometheus
      metadata:
        serverAddress: {{ $address }}
        query: sum(baton_engine_waiting_prompt_tokens{ {{- $pods -}} })
        threshold: "4096"
    {{- else }}
    - type: prometheus
      metadata:
        serverAddress: {{ $address }}
        query: sum(baton_engine_num_waiting{ {{- $pods -}} })
        threshold: "2"
    - type: prometheus
      metricType: Value
      metadata:
        serverAddress: {{ $address }}
        query: sum(baton_engine_blocks_active{ {{- $pods -}} }) / sum(baton_engine_num_blocks{ {{- $pods -}} })
        threshold: "0.8"
    {{- end }}
    {{- end }}
{{- end }}
{{- end -}}
