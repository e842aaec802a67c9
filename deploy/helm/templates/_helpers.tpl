{{/* Labels of a component: include "finetune.labels" (list $ "mlflow") */}}
{{- define "finetune.labels" -}}
{{ include "finetune.selector" . }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- define "finetune.selector" -}}
app.kubernetes.io/name: finetune
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Name of an object of this release: include "finetune.name" (list $ "mlflow") */}}
{{- define "finetune.name" -}}
{{ printf "%s-%s" (trunc 40 (index . 0).Release.Name) (index . 1) | trimSuffix "-" }}
{{- end }}

{{/* Pods run as a user without rights, in the image and on the volume */}}
{{- define "finetune.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "finetune.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "finetune.pullSecrets" -}}
{{- with .Values.pullSecrets }}
imagePullSecrets:
{{- range . }}
- {name: {{ . | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "finetune.image" -}}
{{ required "image: required, such as --set image=registry.example.com/finetune:1" .Values.image | quote }}
{{- end }}

{{/* Addresses and folders of flows and workers: name and value of each variable */}}
{{- define "finetune.variables" -}}
FINETUNE_RUNS: {{ .Values.runs.path | quote }}
{{- with .Values.store }}
FINETUNE_STORE: {{ . | quote }}
{{- end }}
MLFLOW_TRACKING_URI: http://{{ include "finetune.name" (list . "mlflow") }}:5000
PREFECT_API_URL: http://{{ include "finetune.name" (list . "prefect") }}:4200/api
{{- end }}

{{- define "finetune.envFrom" -}}
{{- range . }}
- secretRef: {name: {{ . | quote }}}
{{- end }}
{{- end }}

{{/* The database's URL as a variable: list $ NAME KEY DRIVER */}}
{{- define "finetune.database" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.database.external }}
- name: {{ index . 1 }}
  valueFrom: {secretKeyRef: {name: {{ $root.Values.database.secret | quote }}, key: {{ index . 2 }}}}
{{- else }}
- name: DATABASE_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $root.Values.database.secret | quote }}, key: password}}
- name: {{ index . 1 }}
  value: {{ index . 3 }}://finetune:$(DATABASE_PASSWORD)@{{ include "finetune.name" (list $root "postgres") }}:5432/{{ index . 2 }}
{{- end }}
{{- end }}

{{/* Settings of gangs, one KEY=VALUE per line, as commands and Prefect's form take them */}}
{{- define "finetune.gang" -}}
{{- $pairs := list }}
{{- range $key, $value := .Values.gangs.nodeSelector }}{{ $pairs = append $pairs (printf "%s=%s" $key $value) }}{{ end -}}
{{- $amounts := list }}
{{- range $key, $value := .Values.gangs.resources }}{{ $amounts = append $amounts (printf "%s=%v" $key $value) }}{{ end -}}
gang.engine=kubernetes
kubernetes.namespace={{ .Release.Namespace }}
kubernetes.image={{ .Values.image }}
kubernetes.claim={{ .Values.runs.claim }}
kubernetes.gpus={{ .Values.gangs.gpus | default "null" }}
kubernetes.shm={{ .Values.gangs.shm }}
kubernetes.secrets=[{{ join "," .Values.secrets }}]
kubernetes.pull_secrets=[{{ join "," .Values.pullSecrets }}]
kubernetes.selector=[{{ join "," $pairs }}]
kubernetes.tolerations=[{{ join "," .Values.gangs.tolerations }}]
kubernetes.resources=[{{ join "," $amounts }}]
kubernetes.host_network={{ .Values.gangs.hostNetwork }}
{{- with .Values.gangs.network }}
gang.network={{ . }}
{{- end }}
{{- range $key := list "queue" "priority" "topology" "cpu" "memory" }}
{{- with index $.Values.gangs $key }}
kubernetes.{{ $key }}={{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* A server's probe: list PATH PORT */}}
{{- define "finetune.probes" -}}
startupProbe:
  httpGet: {path: {{ index . 0 }}, port: {{ index . 1 }}}
  periodSeconds: 5
  failureThreshold: 60
  timeoutSeconds: 5
readinessProbe: {httpGet: {path: {{ index . 0 }}, port: {{ index . 1 }}}, timeoutSeconds: 5}
livenessProbe: {httpGet: {path: {{ index . 0 }}, port: {{ index . 1 }}}, periodSeconds: 20, failureThreshold: 6, timeoutSeconds: 10}
{{- end }}
