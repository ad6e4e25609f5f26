"""More chat templates, as `chat_templates` has them, and all of them by name."""

from __future__ import annotations

from tests.support import chat_templates as first
from tests.support.chat_templates import Family

PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + "
    "'<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI_4 = (
    "{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + "
    "message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + "
    "message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}{% generation %}"
    "{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
DEEPSEEK_2 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_DEEPSEEK = """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='', is_first_sp=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
    {%- if ns.is_first_sp %}
        {%- set ns.system_prompt = ns.system_prompt + message['content'] %}{%- set ns.is_first_sp = false %}
    {%- else %}{%- set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}
{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
    {%- set ns.is_tool = false -%}{{- '<｜User｜>' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'assistant' and CALLS %}
    {%- set ns.is_first = false %}
    {%- for tool in message['tool_calls'] %}
        {%- if not ns.is_first %}
            {{- '<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}
            {%- set ns.is_first = true -%}
        {%- else %}{{- '\\n' + '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}{%- endif %}
        {{- tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' }}
        {{- '<｜tool▁call▁end｜>' }}
    {%- endfor %}
    {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'assistant' and message['content'] is not none %}
    {%- set content = message['content'] %}THINK
    {%- if ns.is_tool %}
        {{- '<｜tool▁outputs▁end｜>' + content + '<｜end▁of▁sentence｜>' }}{%- set ns.is_tool = false -%}
    {%- else %}{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- endif %}
{%- if message['role'] == 'tool' %}
    {%- if not ns.is_tool %}{{- '<｜tool▁outputs▁begin｜>' }}{%- endif %}{%- set ns.is_tool = true -%}
    {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor -%}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜>PROMPT' }}{% endif %}{# tools #}"""
DEEPSEEK_3 = _DEEPSEEK.replace("CALLS", "message['content'] is none").replace("THINK", "").replace("PROMPT", "")
"""Tells a call by content that is null."""
DEEPSEEK_R1 = (
    _DEEPSEEK.replace("CALLS", "'tool_calls' in message")
    .replace("THINK", "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}")
    .replace("PROMPT", "<think>\\n")
)
COMMAND_R = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {%- set loop_messages = messages[1:] %}{%- set system_message = messages[0]['content'] %}
{%- else %}{%- set loop_messages = messages %}{%- set system_message = false %}{%- endif %}
{%- if system_message != false %}
  {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}
{%- endif %}
{%- for message in loop_messages %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {%- endif %}
  {%- set content = message['content'] %}
  {%- if message['role'] == 'user' %}
    {{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
  {%- elif message['role'] == 'assistant' %}
    {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}
"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
VICUNA = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content ~ ' ' }}"
    "{% elif message.role == 'user' %}{{ 'USER: ' ~ message.content ~ ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' ~ message.content ~ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
ALPACA = """{%- set names = {'user': '### Instruction', 'assistant': '### Response'} -%}
{%- if messages[0].role != 'system' -%}Below is an instruction. Write a response.{{ '\n\n' }}{%- endif -%}
{%- for message in messages -%}
{{ message.content if message.role == 'system' else names.get(message.role, '### Input') ~ ':\n' ~ message.content }}
{{- '\n\n' if not loop.last or add_generation_prompt else '' }}
{%- endfor -%}
{{ '### Response:\n' if add_generation_prompt }}"""
SMOLLM_2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM_3 = """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
  {%- set system = messages[0].content -%}
  {%- if "/no_think" in system -%}{%- set mode = "/no_think" -%}{%- endif -%}
  {%- set custom = system.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\n## Metadata\n\n" -}}
{{- "Today Date: " ~ strftime_now("%d %B %Y") ~ "\nReasoning Mode: " ~ mode ~ "\n\n" -}}
{{- custom if custom else "You are SmolLM." -}}
{%- if tools or xml_tools -%}
  {{- "\n\n### Tools\n\n" -}}
  {%- set ns = namespace(text="<tools>\n") -%}
  {%- for tool in xml_tools or tools -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\n" -%}{%- endfor -%}
  {{- ns.text + "</tools>" -}}
{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "user" -%}{{ "<|im_start|>user\n" + content + "<|im_end|>\n" }}
  {%- elif message.role == "assistant" -%}
    {% generation %}
    {%- set opened = "<think>\n\n</think>\n" if mode == "/no_think" else "" -%}
    {{ "<|im_start|>assistant\n" + opened + content.lstrip("\n") + "<|im_end|>\n" }}
    {% endgeneration %}
  {%- elif message.role == "tool" -%}{{ "<|im_start|>user\n" + content + "<|im_end|>\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ "<|im_start|>assistant\n" + ("<think>\n\n</think>\n" if mode == "/no_think" else "") }}
{%- endif -%}"""
GRANITE = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Knowledge Cutoff Date: April 2024.\nToday's Date: " + strftime_now('%B %d, %Y') + "." %}
    {%- if tools and documents %}{%- set system_message = system_message + "\nUse tools and documents." %}
    {%- elif tools %}{%- set system_message = system_message + "\nUse tools." %}
    {%- elif documents %}{%- set system_message = system_message + "\nUse documents." %}
    {%- elif thinking %}{%- set system_message = system_message + "\nThink first." %}{%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}{{- '<|end_of_text|>\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] }}
    {%- if message.tool_calls %}
        {{- '<|tool_call|>' }}{{- message.tool_calls | map(attribute='function') | list | tojson }}
    {%- endif %}
    {{- '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}{{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""
OLMO = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + "
    "message['content'] + '\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + "
    "eos_token + '\n' }}{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
FALCON = """{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}
{% if message['role'] == 'system' %}{{ 'System: ' }}{% elif message['role'] == 'user' %}{{ 'User: ' }}
{% elif message['role'] == 'assistant' %}{{ 'Falcon: ' }}{% endif %}
{{ message['content'].replace('\r\n', '\n').replace('\n\n', '\n') }}{% endfor %}
{% if add_generation_prompt %}{{ '\n' + 'Falcon:' }}{% endif %}"""
INTERNLM = "{{ bos_token }}" + SMOLLM_2.split("{% if loop.first")[0] + SMOLLM_2.split("{% endif %}", 1)[1]
YI = (
    "{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}{% endif %}"
    "{% if system_message is defined %}{{ '<|im_start|>system\n' + system_message + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}"
    "{{ '<|im_start|>user\n' + content + '<|im_end|>\n<|im_start|>assistant\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ content + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
)
STABLE_LM = (
    "{% for message in messages %}{% if message['role'] in ['user', 'system'] %}{{ '<|' ~ message['role'] ~ '|>\n' ~ "
    "message['content'] | trim ~ eos_token ~ '\n' }}{% else %}{{ '<|assistant|>\n' ~ message['content'] | trim ~ "
    "eos_token ~ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
HERMES = """
{%- macro json_to_python_type(json_spec) %}
    {%- set basic = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
    {%- if basic[json_spec.type] is defined %}{{- basic[json_spec.type] }}
    {%- elif json_spec.type == "array" %}{{- "list[" +  json_to_python_type(json_spec.items) + "]" }}
    {%- elif json_spec.type is iterable and json_spec.type is not string %}
        {{- "Union[" }}
        {%- for t in json_spec.type %}
            {{- json_to_python_type({"type": t}) }}{%- if not loop.last %}{{- "," }}{%- endif %}
        {%- endfor %}{{- "]" }}
    {%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\nYou call functions: <tools> ' }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- '{"type": "function", "function": ' }}
        {{- '{"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
        {%- for name, fields in tool.parameters.properties|items %}
            {{- name + ": " + json_to_python_type(fields) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- ") - " + tool.description + "\\n\\n" }}
        {%- for name, fields in tool.parameters.properties|dictsort if fields.description %}
            {{- "        " + name + ": " + fields.description|trim|replace('"', "'") }}
        {%- else %}{{- "no words" }}
        {%- endfor %}
        {{- '", "parameters": ' }}{{- tool.parameters | tojson }}{{- "}}\\n" if not loop.last else "}}" }}
    {%- endfor %}
    {{- " </tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" or not (message.tool_calls or message.role == "tool") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.function.name }}{{- '", "arguments": ' }}
            {{- tool_call.function.arguments|tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '\\n<tool_response>\\n' if loop.previtem and loop.previtem.role == "tool" else '<|im_start|>tool\\n' }}
        {{- message.content }}{{- '\\n</tool_response>' }}
        {{- '<|im_end|>' if loop.last or loop.nextitem.role != "tool" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
HARMONY = """
{%- set model_identity = model_identity | default("You are a model.") -%}
{%- macro say(role, channel=none) -%}
<|start|>{{ role }}{{ '<|channel|>' ~ channel if channel }}<|message|>{{ caller() }}
{%- endmacro -%}
{%- call say('system') -%}
{{ model_identity }} Reasoning: {{ reasoning_effort | default('medium', true) }}
{%- endcall -%}<|end|>
{%- for message in messages -%}
{%- if message.role == 'tool' %}{% continue %}{% endif -%}
{%- if message.thinking is defined and loop.last -%}
{%- call say('assistant', 'analysis') %}{{ message.thinking }}{% endcall %}<|end|>
{%- endif -%}
{%- call say(message.role, 'final' if message.role == 'assistant') %}{{ message.content }}{% endcall -%}
{{ '<|return|>' if loop.last and message.role == 'assistant' and not add_generation_prompt else '<|end|>' }}
{%- if loop.index > 40 %}{% break %}{% endif -%}
{%- endfor -%}
{{ '<|start|>assistant' if add_generation_prompt }}"""

_IM = ("<|im_start|>", "<|im_end|>")
_QWEN = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
_LLAMA_MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "marks": _LLAMA_MARKS}
_INST = ("[INST]", "[/INST]")
_MISTRAL = (*_INST, "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "marks": ("<start_of_turn>", "<end_of_turn>")}
_PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_DEEPSEEKS = {
    "bos_token": "<｜begin▁of▁sentence｜>",
    "eos_token": "<｜end▁of▁sentence｜>",
    "marks": ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
}
_THINKING = ({"enable_thinking": False}, {"enable_thinking": True})

FAMILIES = {
    "chatml": Family(first.CHATML, marks=_IM),
    "qwen-2.5": Family(first.QWEN_25, marks=_IM, tools=True, **_QWEN),
    "qwen-3": Family(first.QWEN_3, marks=_IM, tools=True, variables=_THINKING, **_QWEN),
    "llama-2": Family(first.LLAMA_2),
    "llama-3": Family(first.LLAMA_3, **_LLAMA),
    "llama-3.1": Family(
        first.LLAMA_31, tools=True, variables=({"date_string": "1 May"}, {"tools_in_user_message": False}), **_LLAMA
    ),
    "llama-3.2": Family(first.LLAMA_32, tools=True, **_LLAMA),
    "mistral-v1": Family(first.MISTRAL_1),
    "mixtral": Family(first.MIXTRAL),
    "mistral-v3": Family(first.MISTRAL_3, marks=_MISTRAL, tools=True),
    "mistral-nemo": Family(first.MISTRAL_NEMO, marks=_MISTRAL, tools=True),
    "mistral-tekken": Family(first.MISTRAL_TEKKEN, marks=(*_INST, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")),
    "gemma": Family(first.GEMMA, **_GEMMA),
    "gemma-2": Family(first.GEMMA.replace("'<start_of_turn>' +", "'\n<start_of_turn>' +"), **_GEMMA),
    "gemma-3": Family(first.GEMMA_3, **_GEMMA),
    "phi-3": Family(PHI_3, eos_token="<|endoftext|>", marks=_PHI),
    "phi-4": Family(PHI_4, marks=(*_IM, "<|im_sep|>")),
    "deepseek-v2": Family(DEEPSEEK_2, **_DEEPSEEKS),
    "deepseek-v3": Family(DEEPSEEK_3, tools=True, text_arguments=True, null_content=True, **_DEEPSEEKS),
    "deepseek-r1": Family(DEEPSEEK_R1, tools=True, text_arguments=True, **_DEEPSEEKS),
    "command-r": Family(COMMAND_R, marks=("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>")),
    "zephyr": Family(ZEPHYR),
    "vicuna": Family(VICUNA),
    "alpaca": Family(ALPACA),
    "smollm-2": Family(SMOLLM_2, marks=_IM),
    "smollm-3": Family(SMOLLM_3, marks=_IM, tools=True, variables=(*_THINKING, {"xml_tools": [{"name": "f"}]})),
    "granite": Family(
        GRANITE,
        marks=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        tools=True,
        variables=({"thinking": True}, {"controls": {"length": "short", "tone": "\u00e9"}}),
    ),
    "olmo": Family(OLMO, marks=("<|system|>", "<|user|>", "<|assistant|>")),
    "falcon": Family(FALCON),
    "internlm": Family(INTERNLM, marks=_IM),
    "yi": Family(YI, marks=_IM),
    "stablelm": Family(STABLE_LM, marks=("<|user|>", "<|assistant|>", "<|system|>")),
    "hermes": Family(HERMES, marks=_IM, tools=True),
    "harmony": Family(
        HARMONY,
        marks=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
        variables=({"reasoning_effort": "high"}, {"model_identity": "I am \u00e9"}),
    ),
}
