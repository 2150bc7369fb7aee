{{- /*
A pod of any service, for a Deployment or a StatefulSet.
  root, component, pool, name   as labels have them
  spec                          the component's values (resources, image, env, ...)
  command, flags                what runs; flags is a map
  ports                         [{name, containerPort}]
  health                        {grpc: PORT} or {http: PORT, scheme}: what probes ask
  drainS                        seconds that the service takes for running requests
  auth                          keys of the auth secret that it reads
  model                         none, light (what a router needs: no weights) or full
  api, account                  whether it talks to the API server, and the end of its ServiceAccount's name (default: router)
  redis, volumes, mounts        more of them
*/ -}}
{{- define "baton.pod" -}}
{{- $root := .root -}}
{{- $spec := .spec -}}
{{- $image := include "baton.image" (dict "root" $root "image" $spec.image) -}}
{{- $model := include "baton.model" $root | fromYaml -}}
{{- $fetches := and (ne .model "none") (has $model.kind (list "fetched" "init")) -}}
{{- $mountsModel := and (ne .model "none") (ne $model.kind "path") -}}
metadata:
  labels:
    {{- include "baton.selector" . | nindent 4 }}
    {{- with .worker }}
    baton/worker: "true"
    {{- end }}
    {{- with $root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $spec.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if or $spec.podAnnotations (and $fetches (eq $model.kind "fetched")) }}
  annotations:
    {{- if and $fetches (eq $model.kind "fetched") }}
    checksum/fetch: {{ $root.Files.Get "files/fetch_model.py" | sha256sum }}
    {{- end }}
    {{- with $spec.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  serviceAccountName: {{ include "baton.fullname" $root }}{{ if .api }}-{{ .account | default "router" }}{{ end }}
  automountServiceAccountToken: {{ .api | default false }}
  {{- /* Variables of a Service called baton (BATON_PORT=tcp://...) would be read as flags. */}}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (int $spec.preStopSleepS) (int (ceil .drainS)) 10 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $spec.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $spec.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $spec.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $spec.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $spec.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $spec.topologySpread }}
  topologySpreadConstraints:
    {{- $selector := include "baton.selector" . }}
    {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- $selector | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- if $fetches }}
  initContainers:
    - name: model
      {{- if eq $model.kind "init" }}
      image: {{ $root.Values.model.init.image }}
      {{- with $root.Values.model.init.command }}
      command: {{ toJson . }}
      {{- end }}
      {{- with $root.Values.model.init.args }}
      args: {{ toJson . }}
      {{- end }}
      {{- else }}
      image: {{ $image }}
      command: [python, /run/baton/fetch/fetch_model.py]
      args:
        - {{ $root.Values.model.source | quote }}
        - {{ $model.path }}{{ if eq .model "light" }}-light{{ end }}
        {{- with $root.Values.model.sha256 }}
        - --sha256={{ . }}
        {{- end }}
        {{- if eq .model "light" }}
        - --no-weights
        {{- end }}
      {{- end }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      env:
        - {name: MODEL_PATH, value: {{ $model.path }}}
      resources:
        {{- toYaml $spec.resources | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurity" (list) | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: tmp, mountPath: /tmp}
        {{- if eq $model.kind "fetched" }}
        - {name: fetch, mountPath: /run/baton/fetch, readOnly: true}
        {{- end }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ $image }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [{{ .command }}]
      args:
        {{- include "baton.flags" .flags | trim | nindent 8 }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if and (ne .model "none") (eq $model.kind "hub") }}
        - {name: HF_HOME, value: /models/hub}
        {{- if $root.Values.model.hubToken.existingSecret }}
        - {name: HF_TOKEN_PATH, value: /run/baton/hub/token}
        {{- end }}
        {{- end }}
        {{- with $spec.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range .ports }}
        - {name: {{ .name }}, containerPort: {{ .containerPort }}, protocol: TCP}
        {{- end }}
      startupProbe:
        {{- include "baton.probe" (dict "root" $root "health" .health "kind" "alive") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 10
        failureThreshold: {{ div (add (int $spec.startupTimeoutS) 4) 5 }}
      livenessProbe:
        {{- include "baton.probe" (dict "root" $root "health" .health "kind" "alive") | nindent 8 }}
        periodSeconds: 20
        timeoutSeconds: 10
        failureThreshold: 3
      readinessProbe:
        {{- include "baton.probe" (dict "root" $root "health" .health "kind" "ready") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ $spec.preStopSleepS | quote }}]}
      resources:
        {{- toYaml $spec.resources | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurity" ($spec.capabilities | default list) | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: auth, mountPath: /run/baton/auth, readOnly: true}
        {{- if $root.Values.tls.enabled }}
        - {name: tls, mountPath: /run/baton/tls, readOnly: true}
        {{- end }}
        {{- if .redis }}
        - {name: redis, mountPath: /run/baton/redis, readOnly: true}
        {{- end }}
        {{- if $mountsModel }}
        - {name: models, mountPath: /models, readOnly: {{ ne $model.kind "hub" }}}
        {{- if and (eq $model.kind "hub") $root.Values.model.hubToken.existingSecret }}
        - {name: hub, mountPath: /run/baton/hub, readOnly: true}
        {{- end }}
        {{- end }}
        {{- with $spec.sharedMemory }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- with .mounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with $spec.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 2Gi}
    - name: auth
      secret:
        secretName: {{ include "baton.authSecret" $root }}
        items:
          {{- range .auth }}
          - {key: {{ . }}, path: {{ . }}}
          {{- end }}
    {{- if $root.Values.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ include "baton.tlsSecret" $root }}
    {{- end }}
    {{- if .redis }}
    - name: redis
      secret:
        secretName: {{ include "baton.redisSecret" $root }}
        items:
          - {key: {{ $root.Values.redis.key }}, path: url}
    {{- end }}
    {{- if $mountsModel }}
    - name: models
      {{- if eq $model.kind "claim" }}
      persistentVolumeClaim: {claimName: {{ $model.claim }}, readOnly: true}
      {{- else if $root.Values.model.cache.existingClaim }}
      persistentVolumeClaim: {claimName: {{ $root.Values.model.cache.existingClaim }}}
      {{- else }}
      emptyDir:
        {{- with $root.Values.model.cache.sizeLimit }}
        sizeLimit: {{ . }}
        {{- else }}
        {}
        {{- end }}
      {{- end }}
    {{- if and (eq $model.kind "hub") $root.Values.model.hubToken.existingSecret }}
    - name: hub
      secret:
        secretName: {{ $root.Values.model.hubToken.existingSecret }}
        items:
          - {key: {{ $root.Values.model.hubToken.key }}, path: token}
    {{- end }}
    {{- end }}
    {{- if and $fetches (eq $model.kind "fetched") }}
    - name: fetch
      configMap: {name: {{ include "baton.fullname" $root }}-fetch}
    {{- end }}
    {{- with $spec.sharedMemory }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ . }}}
    {{- end }}
    {{- with .volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $spec.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{- /* The kubelet's own gRPC probe knows no TLS: then the service's image asks itself. */ -}}
{{- define "baton.probe" -}}
{{- if .health.http -}}
httpGet:
  path: {{ eq .kind "alive" | ternary "/health" "/readyz" }}
  port: {{ .health.http }}
  scheme: {{ .health.scheme }}
{{- else if .root.Values.tls.enabled -}}
exec:
  command:
    - baton
    - health
    - 127.0.0.1:{{ .health.grpc }}
    - --timeout-s=5
    {{- if eq .kind "alive" }}
    - --service=liveness
    {{- end }}
    - --tls-cert=/run/baton/tls/tls.crt
    - --tls-key=/run/baton/tls/tls.key
    - --tls-ca=/run/baton/tls/ca.crt
    - --tls-name={{ include "baton.tlsName" .root }}
{{- else -}}
grpc:
  port: {{ .health.grpc }}
  {{- if eq .kind "alive" }}
  service: liveness
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "baton.pdb" -}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
{{- end -}}
