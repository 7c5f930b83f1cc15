/* regress.c: act scripts out without a fuzzer.
 *
 * usage: regress TARGET FILE|FOLDER...   all of them, each in a process of its own; prints "N passed, M failed"
 *        regress TARGET --hex SCRIPT     one, printing every step
 *        regress --table                 the alphabet: opcode, name, operands
 */
#include "script.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_BYTES = 1 << 16, MAX_PATH = 4096 };

typedef void (*script_run)(script *script);

typedef struct target {
    const char *name;
    script_run run;
} target;

static const target TARGETS[] = {
    {"arena", script_arena}, {"cache", script_cache}, {"lease", script_lease}, {"pager", script_pager},
    {"phase", script_phase}, {"ring", script_ring},   {"tape", script_tape},
};

typedef struct tally {
    script_run run;
    uint32_t n_passed;
    uint32_t n_failed;
} tally;

static int print_table(void)
{
    for (uint32_t i = 0; i < N_ACTIONS; i++) {
        printf("%u %s %u\n", i, action_name((action)i), action_operands((action)i));
    }
    return 0;
}

static int run_hex(script_run run, const char *hex)
{
    uint8_t bytes[MAX_BYTES];
    size_t n_bytes = 0;
    for (; hex[0] != '\0' && hex[1] != '\0' && n_bytes < MAX_BYTES; hex += 2) {
        const char digits[] = {hex[0], hex[1], '\0'};
        char *end = NULL;
        bytes[n_bytes++] = (uint8_t)strtoul(digits, &end, 16);
        if (*end != '\0') {
            fprintf(stderr, "no hexadecimal digits: %s\n", digits);
            return 2;
        }
    }
    script script = {.bytes = bytes, .n_bytes = n_bytes, .is_loud = true};
    run(&script);
    printf("%u steps passed\n", script.n_steps);
    return 0;
}

static int run_bytes(script_run run, const char *path)
{
    static uint8_t bytes[MAX_BYTES];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        return 1;
    }
    script script = {.bytes = bytes, .n_bytes = fread(bytes, 1, sizeof bytes, file)};
    fclose(file);
    run(&script);
    return 0;
}

/* A process for each, so that one that aborts does not keep the others from being tried. */
static void run_file(tally *tally, const char *path)
{
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        exit(run_bytes(tally->run, path));
    }
    int status = -1;
    if (child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        tally->n_passed++;
    } else {
        tally->n_failed++;
        fprintf(stderr, "%s: failed\n", path);
    }
}

static void run_path(tally *tally, const char *path);

static void run_folder(tally *tally, const char *path)
{
    struct dirent **entries = NULL;
    const int n = scandir(path, &entries, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char below[MAX_PATH];
        const int length = snprintf(below, sizeof below, "%s/%s", path, entries[i]->d_name);
        if (entries[i]->d_name[0] != '.' && length > 0 && length < MAX_PATH) {
            run_path(tally, below);
        }
        free(entries[i]);
    }
    free(entries);
}

static void run_path(tally *tally, const char *path)
{
    struct stat found;
    if (stat(path, &found) == 0 && S_ISDIR(found.st_mode)) {
        run_folder(tally, path);
    } else {
        run_file(tally, path);
    }
}

static script_run find_target(const char *name)
{
    for (size_t i = 0; i < sizeof TARGETS / sizeof TARGETS[0]; i++) {
        if (strcmp(TARGETS[i].name, name) == 0) {
            return TARGETS[i].run;
        }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--table") == 0) {
        return print_table();
    }
    tally tally = {.run = argc > 2 ? find_target(argv[1]) : NULL};
    if (tally.run == NULL) {
        fprintf(stderr, "usage: regress TARGET FILE|FOLDER... | TARGET --hex SCRIPT | --table\n");
        return 2;
    }
    if (argc == 4 && strcmp(argv[2], "--hex") == 0) {
        return run_hex(tally.run, argv[3]);
    }
    for (int i = 2; i < argc; i++) {
        run_path(&tally, argv[i]);
    }
    printf("%u passed, %u failed\n", tally.n_passed, tally.n_failed);
    return tally.n_failed == 0 && tally.n_passed != 0 ? 0 : 1;
}
